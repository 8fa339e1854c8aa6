"""The line that NeMo-RL 7ea279abf rewrites in place (vllm/patches.py, _patch_vllm_init_workers_ray); never called."""


def _init_executor(self, placement_group):  # noqa: ANN001, ANN202
    self._init_workers_ray(placement_group)
    raise NotImplementedError("Ray executors are not answered by the CPU stand-in of vLLM")
