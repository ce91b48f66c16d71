"""Checkpoints that really differ, made on the spot, for weight updates when nobody is training.

Tensors get Gaussian noise in proportion to their own spread, so the model stays what it is and every logprob moves. The
same folder, number and noise give the same checkpoint. Embeddings stay as they are unless asked for: vLLM 0.32 on a CPU
keeps a packed copy of an output projection that shares them, and no reload renews it.
"""

from pathlib import Path

from harness.errors import ModelError

WEIGHTS = "model.safetensors"

_EMBEDDINGS = ("embed_tokens.", "lm_head.")


def perturb_checkpoint(
    source: Path, target: Path, *, number: int, noise: float, moves_embeddings: bool = False
) -> Path:
    """A copy of the model in `source`, its weights moved by `noise` standard deviations; returns `target`.

    `number` chooses the direction. Files that are not weights are linked. Raises `ModelError` when `source` has no
    weights.
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
            if not moves_embeddings and any(part in name for part in _EMBEDDINGS):
                tensors[name] = tensor
                continue
            wide = tensor.float()
            moved = wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)
            tensors[name] = moved.to(tensor.dtype).contiguous()
    scratch = (target / WEIGHTS).with_suffix(".partial")
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.replace(target / WEIGHTS)
    return target
