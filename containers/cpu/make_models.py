r"""Make the tiny models and their data: `python make_models.py OUT`. No network; about a minute on two cores.

    OUT/models/random       Qwen3, 2 layers of 64, random weights: where only shapes matter
    OUT/models/trained      Qwen3 overfitted on `Swap red cat` -> `cat red`: a broken mapping shows as a large loss
                            (with random weights the loss is about ln(vocabulary) whatever the mapping does)
    OUT/models/noisy        Qwen3 that answers `3 + 4 =` with \boxed{7} about six times of ten: GRPO's reward varies,
                            so loss and grad_norm are not 0
    OUT/models/noisy_qwen2  the same as Qwen2, for scripts that insist on a stock Qwen2.5 name
    OUT/models/noisy_moe    the same as Qwen3-MoE: the MLP of `noisy` four times, each with its inner units in another
                            order and a little changed, so that parts of two experts do not fit together
    OUT/models/player       Qwen3 that plays the sliding puzzle at random, one `<action>left</action>` a turn, with a
                            tokenizer of its own: turns are short, and games of one move are often won
    OUT/data/swap, OUT/data/sums   train.jsonl, val.jsonl (input, output, expected_answer); sums also pref_*.jsonl

Seeded, one thread a model: the same weights every time on the same machine.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

WORDS = (
    *("red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven"),
    *("cat", "dog", "bird", "fish", "tree", "sun", "moon", "star"),
)
VOCABULARY = 512
END, PAD = "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
RIGHT_OF_TEN = 6
SWAP_TRAINED = 260  # of 324 pairs; the rest is validation
SUMS_TRAINED = 80  # of 100 sums
PEAK_RATE = 4e-3
MOVES = ("up", "down", "left", "right")
EXPERTS, EXPERT_NOISE = 4, 1.2  # noise in standard deviations of a weight
# name -> (kind, data set, optimizer steps, sequences a step); 500 and 600 steps take 20 to 30 s on one core
TRAINED: dict[str, tuple[str, str, int, int]] = {
    "trained": ("qwen3", "swap", 500, 64),
    "noisy": ("qwen3", "sums", 600, 64),
    "noisy_qwen2": ("qwen2", "sums", 600, 64),
    "player": ("qwen3", "game", 120, 16),
}
Row = dict[str, str]


def swap_rows() -> list[Row]:
    """Return every pair of words once, in a fixed random order."""
    pairs = [(a, b) for a in WORDS for b in WORDS]
    random.Random(1).shuffle(pairs)  # noqa: S311 - data, not secrets
    return [{"input": f"Swap {a} {b}", "output": f"{b} {a}", "expected_answer": f"{b} {a}"} for a, b in pairs]


def sum_rows() -> list[Row]:
    """Return every sum of two digits once, in a fixed random order."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(2).shuffle(pairs)  # noqa: S311 - data, not secrets
    return [{"input": f"{a} + {b} =", "output": f"\\boxed{{{a + b}}}", "expected_answer": str(a + b)} for a, b in pairs]


def write_data(folder: Path) -> None:
    """Write both data sets; `pref_*.jsonl` holds preference pairs (prompt, chosen, rejected) for DPO."""
    swaps, sums = swap_rows(), sum_rows()
    files = {
        "swap/train": swaps[:SWAP_TRAINED],
        "swap/val": swaps[SWAP_TRAINED:],
        "sums/train": sums[:SUMS_TRAINED],
        "sums/val": sums[SUMS_TRAINED:],
    }
    for part in ("train", "val"):
        files[f"sums/pref_{part}"] = [
            {
                "prompt": row["input"],
                "chosen": row["output"],
                "rejected": f"\\boxed{{{int(row['expected_answer']) + 3}}}",
            }
            for row in files[f"sums/{part}"]
        ]
    for name, rows in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def game_texts() -> list[tuple[str, str]]:
    """Return (what came before, the move) for the player: any text, then its turn; each move as often as the others."""
    chosen = random.Random(4)  # noqa: S311 - data, not secrets
    words = [*Path(__file__).read_text().split(), *map(str, range(10)), "|", "+----+----+"]
    made = []
    for number in range(800):
        before = " ".join(chosen.choices(words, k=chosen.randint(2, 10))) + "\n"
        first = f"<|im_start|>user\n{before}<|im_end|>\n<|im_start|>assistant"
        later = f"{before}<environment>\n{before}</environment>\n"
        made.append((later if number % 2 else first, f"<action>{MOVES[number % len(MOVES)]}</action>"))
    return made


def make_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer with a chat template, learnt from `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, bos_token=None)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(kind: str, tokenizer: Any) -> Any:
    """Return a seeded random Qwen of 2 layers: 4 heads in 2 groups, hidden 64, tied embeddings."""
    import torch
    import transformers

    torch.manual_seed(0)
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if kind == "qwen3_moe":
        experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
        shared["moe_intermediate_size"] = shared["intermediate_size"]
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(head_dim=16, **experts, **shared))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=16, **shared))
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shared))


def examples(task: str, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Return (prompt tokens, answer tokens) exactly as NeMo-RL will build them.

    swap: the default chat template of sft.yaml with add_eos; sums: the tokenizer's chat template, as GRPO prompts are.
    """

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    end = [tokenizer.eos_token_id]
    if task == "swap":
        rows = swap_rows()[:SWAP_TRAINED]
        whole = [(f" Question: {r['input']} Answer:", f" {r['output']}") for r in rows]
        # tokenised as one text: the boundary of prompt and answer may lie inside a merge
        return [((p := tokens(prompt)), tokens(prompt + answer)[len(p) :] + end) for prompt, answer in whole]
    if task == "game":
        return [(tokens(before), tokens(move) + end) for before, move in game_texts()]
    answers = random.Random(3)  # noqa: S311 - data, not secrets
    made = []
    for row in sum_rows()[:SUMS_TRAINED]:
        chat = [{"role": "user", "content": row["input"]}]
        prompt = tokens(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        for i in range(10):
            answer = row["expected_answer"] if i < RIGHT_OF_TEN else str(answers.randint(0, 18))
            made.append((prompt, tokens(f"\\boxed{{{answer}}}") + end))
    return made


def train(name: str, out: Path) -> None:
    """Train the model `name` of TRAINED and save it with its tokenizer."""
    import torch
    from transformers import AutoTokenizer

    kind, task, steps, size = TRAINED[name]
    torch.set_num_threads(1)
    if task == "game":
        tokenizer = make_tokenizer([before + move for before, move in game_texts()])
    else:
        tokenizer = AutoTokenizer.from_pretrained(out / "models" / "random")
    pairs = examples(task, tokenizer)
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    model = make_model(kind, tokenizer)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    for step in range(1, steps + 1):
        batch = torch.randperm(len(pairs))[:size]
        mask = (ids[batch] != tokenizer.pad_token_id).long()
        loss = model(input_ids=ids[batch], labels=labels[batch], attention_mask=mask).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{name}: step {step}/{steps}, loss {loss.item():.4f}", flush=True)
    model.save_pretrained(out / "models" / name)
    tokenizer.save_pretrained(out / "models" / name)


def split_into_experts(models: Path, tokenizer: Any) -> None:
    """Make `noisy_moe` from `noisy`; its router stays random, because any two experts answer nearly alike."""
    import torch
    from transformers import AutoModelForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(models / "noisy").state_dict()
    model = make_model("qwen3_moe", tokenizer)
    torch.manual_seed(2)
    for name, parameter in model.state_dict().items():
        owner, _, part = name.partition(".experts.")
        if not part:
            parameter.copy_(dense.get(name, parameter))
            continue
        gate, up, down = (dense[f"{owner}.{which}_proj.weight"] for which in ("gate", "up", "down"))
        generator = torch.Generator().manual_seed(len(owner) + int(owner.split(".")[2]))
        for expert in parameter:
            order = torch.randperm(len(gate), generator=generator)
            whole = down[:, order] if part == "down_proj" else torch.cat([gate[order], up[order]])
            expert.copy_(whole + EXPERT_NOISE * whole.std() * torch.randn(whole.shape))
    model.save_pretrained(models / "noisy_moe")
    tokenizer.save_pretrained(models / "noisy_moe")


def main(out: Path) -> int:
    """Make everything under `out`, trained models side by side; return the first exit status that is not 0."""
    write_data(out / "data")
    tokenizer = make_tokenizer([f"{row['input']} {row['output']}" for row in swap_rows()])
    make_model("qwen3", tokenizer).save_pretrained(out / "models" / "random")
    tokenizer.save_pretrained(out / "models" / "random")
    running = [subprocess.Popen([sys.executable, __file__, str(out), name]) for name in TRAINED]
    failed = next((code for code in [process.wait() for process in running] if code), 0)
    if not failed:
        split_into_experts(out / "models", tokenizer)
    return failed


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        train(sys.argv[2], folder)
    else:
        sys.exit(main(folder))
