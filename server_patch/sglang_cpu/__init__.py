"""Test support: stand-ins with which SGLang serves a small model on a CPU.

`harness engine up sglang` puts `path/` on `PYTHONPATH`, without a GPU only. The stand-ins refuse a CUDA torch.
Speculative decoding and images are out of scope.
"""

_PIN = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def register() -> None:
    """Register the hook, a plugin of the group `sglang.srt.plugins`; called by SGLang in each process.

    The host buffer of routed experts is pinned even where no GPU reads it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PIN, _leave_unpinned, HookType.REPLACE)


def _leave_unpinned(*arguments: object, **options: object) -> None:
    del arguments, options
