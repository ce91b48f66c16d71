"""Checkpoints that really differ, for weight updates without training.

Gaussian noise in proportion to each tensor's own spread keeps the model what it is and moves every logprob. The same
folder, number and noise give the same checkpoint.
"""

from pathlib import Path

from harness.errors import ModelError

WEIGHTS = "model.safetensors"

_EMBEDDINGS = ("embed_tokens.", "lm_head.")


def perturb_checkpoint(
    source: Path, target: Path, *, number: int, noise: float, moves_embeddings: bool = False
) -> Path:
    """Copy the model in `source` to `target`, its weights moved by `noise` standard deviations, and return `target`.

    `number` chooses the direction. Raises `ModelError` if `source` has no weights.
    """
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ModelError(f"expected a model with *.safetensors in {source}, found none")
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = target / file.name
        if file.is_file() and file not in files and not link.exists():
            link.symlink_to(file.resolve())

    import torch  # seconds to import
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for file in files:
        for name, tensor in sorted(load_file(file).items()):
            # vLLM 0.32 on a CPU keeps a packed copy of an output projection tied to them, which no reload renews.
            if not moves_embeddings and any(part in name for part in _EMBEDDINGS):
                tensors[name] = tensor
                continue
            wide = tensor.float()
            moved = wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)
            tensors[name] = moved.to(tensor.dtype).contiguous()
    scratch = (target / WEIGHTS).with_suffix(".partial")  # no engine loads half a checkpoint
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.replace(target / WEIGHTS)
    return target
