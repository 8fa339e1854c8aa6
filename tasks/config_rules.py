"""What a resolved config must satisfy before a GPU is touched: pure, a function of config, case and variables.

Each rule is one that NeMo-RL or Core raises by itself only after Ray, the workers and often the model are up
(models/policy/lm_policy.py, distributed/batched_data_dict.py, algorithms/grpo.py of NeMo-RL 7ea279abf;
parallel_state.py of Core), or one that would make the run evidence about something else than what the case claims.
A value that is absent or not a number decides nothing: the rule is then the run's own to apply.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from tasks.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tasks.levels import Case

MODELS = ("policy", "value", "teacher")  # sections that become workers of their own on the training GPUs
TP_GUARD = 4  # NeMo-RL's "known batch-variant accuracy issue with TP>=4"
ROLLOUTS = ("grpo", "ppo")


def judge(case: Case, answers: Sequence[Mapping[str, Any]], env: Mapping[str, str]) -> list[Reason]:
    """Return why the calls of a case cannot run, or would not be the case; empty where nothing speaks against it.

    `answers` are those of containers/resolve.py, `env` variables of the run. Each reason names key, file and remedy.
    A call of which the script computes a part is held against the loader only: what was not read may change anything.
    """
    found: list[Reason] = []
    whole = [answer for answer in answers if answer["config"] is not None and not answer["unread"]]
    for answer in answers:
        where = str(answer["config_file"] or answer["program"])
        found += [refused(error, where) for error in answer["errors"]]
        if answer in whole:
            found += judge_config(case, answer["config"], where, {**env, **answer["variables"]})
    trained = [_section(answer["config"], "policy") for answer in whole]
    if (
        case.backend == "megatron"
        and any(trained)
        and not any(_enabled(policy, "megatron_cfg") for policy in trained)
        and len(whole) == len(answers)
    ):
        where = str(whole[0]["config_file"])
        text = (
            "policy.megatron_cfg.enabled is false: this run would not touch the Bridge, and the case is about Megatron"
        )
        found.append(_reason("backend", "policy.megatron_cfg.enabled", where, text,
                             "policy.megatron_cfg.enabled=true policy.dtensor_cfg.enabled=false"))  # fmt: skip
    return list({reason.text: reason for reason in found}.values())


def refused(error: Mapping[str, Any], where: str) -> Reason:
    """Return the reason for what the checkout itself refused, in its words, with the nearest key if one is unknown."""
    text, key = str(error["text"]).strip(), str(error["key"])
    if error["kind"] == "override" and key and key not in error["keys"]:
        near = difflib.get_close_matches(key, error["keys"], n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}=?" if near else f"++{key}= adds a key that the config lacks"
        return Reason("override", key, f"{where}: {text.splitlines()[0]}: NeMo-RL has no key {key}; {hint}")
    return Reason(str(error["kind"]), key or where, text if where in text else f"{where}: {text}")


def judge_config(case: Case, config: Mapping[str, Any], where: str, env: Mapping[str, str]) -> Iterator[Reason]:
    """Yield what speaks against one resolved config."""
    cluster = _section(config, "cluster")
    nodes, per_node = _number(cluster, "num_nodes") or 1, _number(cluster, "gpus_per_node")
    if per_node and nodes * per_node > case.gpus > 0:
        text = f"cluster.gpus_per_node * cluster.num_nodes is {nodes * per_node}, the case has {case.gpus} GPUs"
        yield _reason("gpus", "cluster.gpus_per_node", where, text, f"cluster.gpus_per_node={case.gpus // nodes}")
    world = training_gpus(config)
    for name in MODELS:
        model = _section(config, name)
        if not model:
            continue
        megatron, dtensor = _enabled(model, "megatron_cfg"), _enabled(model, "dtensor_cfg")
        if megatron and dtensor:
            text = f"both backends enabled: {name}.megatron_cfg.enabled and {name}.dtensor_cfg.enabled"
            yield _reason("backends", f"{name}.dtensor_cfg.enabled", where, text, f"{name}.dtensor_cfg.enabled=false")
        elif not megatron and not dtensor and "megatron_cfg" in model and "dtensor_cfg" in model:
            text = f"no backend enabled: neither {name}.megatron_cfg.enabled nor {name}.dtensor_cfg.enabled"
            yield _reason("backends", f"{name}.megatron_cfg.enabled", where, text, f"{name}.megatron_cfg.enabled=true")
        else:
            yield from _sizes(name, model, "megatron_cfg" if megatron else "dtensor_cfg", world, where)
            yield from _tp_guard(name, model, "megatron_cfg" if megatron else "dtensor_cfg", config, where, env)
    yield from _rollouts(config, where)


def training_gpus(config: Mapping[str, Any]) -> int | None:
    """Return how many GPUs train: all, or what generation in a place of its own leaves; None where nothing says."""
    cluster = _section(config, "cluster")
    nodes, per_node = _number(cluster, "num_nodes") or 1, _number(cluster, "gpus_per_node")
    if not per_node or config.get("on_policy_distillation") or _section(config, "env", "reward_model"):
        return None  # teachers and reward models take GPUs of their own, by rules of their own
    colocated = _section(config, "policy", "generation", "colocated")
    if not colocated or colocated.get("enabled") is not False:
        return nodes * per_node
    taken = _number(colocated, "resources", "gpus_per_node")
    if nodes == 1:
        return per_node - taken if taken else None
    taken_nodes = _number(colocated, "resources", "num_nodes")
    return (nodes - taken_nodes) * per_node if taken_nodes else None


def _sizes(name: str, model: Mapping[str, Any], kind: str, world: int | None, where: str) -> Iterator[Reason]:
    """Yield what does not divide: GPUs by parallel sizes, the global batch by what is left for data parallelism."""
    backend = _section(model, kind)
    prefix = f"{name}.{kind}"
    keys: tuple[str, ...] = ("tensor_parallel_size", "context_parallel_size")
    if kind == "megatron_cfg":
        keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = [_number(backend, key) for key in keys]
    if world is None or any(size is None for size in sizes):
        return
    split = 1
    for size in sizes:
        split *= size or 1
    product = " * ".join(f"{key} {size}" for key, size in zip(keys, sizes, strict=True))
    if world < 1 or world % split:
        text = f"{world} GPUs train, which {prefix}: {product} = {split} does not divide"
        yield _reason("parallel", f"{prefix}.{keys[0]}", where, text, "smaller parallel sizes or more GPUs")
        return
    if kind == "megatron_cfg":
        yield from _experts(prefix, backend, world, where)
    data_parallel = world // split
    whole, micro = _number(model, "train_global_batch_size"), _number(model, "train_micro_batch_size")
    if not whole or not micro:
        return
    if whole % data_parallel:
        text = f"{name}.train_global_batch_size {whole} is no multiple of the {data_parallel} data parallel ranks"
        yield _reason("batch", f"{name}.train_global_batch_size", where, text, f"a multiple of {data_parallel}")
    elif (
        whole // data_parallel % micro
        and not _enabled(model, "sequence_packing")
        and not _enabled(model, "dynamic_batching")
    ):
        text = (
            f"{name}.train_global_batch_size {whole} over {data_parallel} data parallel ranks is no multiple of "
            f"{name}.train_micro_batch_size {micro}"
        )
        yield _reason("batch", f"{name}.train_micro_batch_size", where, text, f"a multiple of {data_parallel * micro}")


def _experts(prefix: str, backend: Mapping[str, Any], world: int, where: str) -> Iterator[Reason]:
    expert, tensor = _number(backend, "expert_model_parallel_size"), _number(backend, "expert_tensor_parallel_size")
    pipeline = _number(backend, "pipeline_model_parallel_size") or 1
    group = (expert or 1) * (tensor or 1) * pipeline
    if world % group:
        text = (
            f"{world} GPUs train, which {prefix}: expert_model_parallel_size {expert} * expert_tensor_parallel_size "
            f"{tensor or 1} * pipeline_model_parallel_size {pipeline} = {group} does not divide"
        )
        yield _reason("parallel", f"{prefix}.expert_model_parallel_size", where, text, "a smaller expert parallel size")


def _tp_guard(
    name: str, model: Mapping[str, Any], kind: str, config: Mapping[str, Any], where: str, env: Mapping[str, str]
) -> Iterator[Reason]:
    key = "tensor_model_parallel_size" if kind == "megatron_cfg" else "tensor_parallel_size"
    tensor, micro = _number(model, kind, key), _number(model, "train_micro_batch_size")
    logprob = _number(model, "logprob_batch_size")
    if name == "value" or not tensor or tensor < TP_GUARD or logprob is None or micro == logprob:
        return
    if env.get("NRL_IGNORE_TP_ACCURACY_CHECK") or _section(config, "loss_fn").get("force_on_policy_ratio") is True:
        return
    text = (
        f"{name}.{kind}.{key} {tensor} with {name}.train_micro_batch_size {micro} and {name}.logprob_batch_size "
        f"{logprob}: NeMo-RL refuses TP >= {TP_GUARD} unless both are equal (known accuracy issue)"
    )
    yield _reason("tp_guard", f"{name}.logprob_batch_size", where, text, f"{name}.logprob_batch_size={micro}")


def _rollouts(config: Mapping[str, Any], where: str) -> Iterator[Reason]:
    """Yield where the samples of a step are no multiple of the global batch: NeMo-RL trains on whole batches only."""
    whole = _number(config, "policy", "train_global_batch_size")
    for kind in ROLLOUTS:
        section = _section(config, kind)
        prompts, answers = _number(section, "num_prompts_per_step"), _number(section, "num_generations_per_prompt")
        if whole and prompts and answers and prompts * answers % whole:
            text = (
                f"{kind}.num_prompts_per_step {prompts} * {kind}.num_generations_per_prompt {answers} = "
                f"{prompts * answers} is no multiple of policy.train_global_batch_size {whole}"
            )
            yield _reason(
                "batch",
                "policy.train_global_batch_size",
                where,
                text,
                f"policy.train_global_batch_size={prompts * answers}",
            )


def _reason(kind: str, key: str, where: str, text: str, remedy: str) -> Reason:
    return Reason(kind, key, f"{where}: {text}; try {remedy}")


def _section(config: Any, *path: str) -> Mapping[str, Any]:
    for part in path:
        config = config.get(part) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _number(config: Any, *path: str) -> int | None:
    value = _section(config, *path[:-1]).get(path[-1])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _enabled(model: Mapping[str, Any], kind: str) -> bool:
    return _section(model, kind).get("enabled") is True
