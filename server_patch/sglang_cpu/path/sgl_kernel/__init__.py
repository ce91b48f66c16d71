"""Stand-in for SGLang's kernel package, which has CUDA builds only. Test support.

SGLang 0.5.23 uses plain torch where `torch.ops.sgl_kernel` lacks a CPU kernel, and imports some functions by name.
"""

import torch

if torch.version.cuda is not None:
    raise ImportError(
        "the CPU stand-in for sgl_kernel was imported with a CUDA build of torch: remove server_patch/sglang_cpu/path"
        " from PYTHONPATH and install the real sglang-kernel"
    )

__version__ = "0.4.10"  # the oldest that SGLang 0.5.23 accepts


def assign_req_to_token_pool_cpu(  # noqa: PLR0917  SGLang calls it with six
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots `start_offset[i]:end_offset[i]` of `out_cache_loc` into the request table, by request."""
    del pool_len
    lengths = (end_offset - start_offset).tolist()
    slots = out_cache_loc.to(req_to_token.dtype).split(lengths)
    for row, start, length, new in zip(req_pool_indices.tolist(), start_offset.tolist(), lengths, slots, strict=True):
        req_to_token[row, start : start + length] = new


_SPECULATIVE = frozenset(
    {
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "build_draft_decode_metadata_cpu",
        "build_tree_kernel_efficient_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "rotate_input_ids_cpu",
        "verify_tree_greedy_cpu",
    }
)


def __getattr__(name: str) -> object:
    if name not in _SPECULATIVE:
        raise AttributeError(f"the CPU stand-in for sgl_kernel has no {name}")

    def refuse(*arguments: object, **options: object) -> None:
        del arguments, options
        raise NotImplementedError(f"the CPU stand-in for sgl_kernel does not implement {name}")

    return refuse
