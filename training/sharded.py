"""Sharded checkpoints: each rank writes its share of the tensors, through
torch.distributed.checkpoint (DCP).

ckpt_last.pt remains the one file that names a checkpoint: it holds the plain values and says where
the tensors are.

    ckpt_last.pt         {..., "shards": {"folder": "ckpt_last.shards-0",
                                          "files": {NAME: (bytes, crc32), ...}}}
    ckpt_last.shards-0/  .metadata  __0_0.distcp  __1_0.distcp  ...

The folder is written first, under a name of its own, and ckpt_last.pt replaced last: after a crash
at any moment it names a whole checkpoint, the old one or the new. Tensors are called model/NAME and
optimizer/INDEX/KEY. Any number of ranks can read what any other number wrote.
"""

import pickle
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from common.distributed import Ranks
from common.errors import CheckpointError

METADATA = ".metadata"
DCP = "torch.distributed.checkpoint"
# What DCP's metadata may be unpickled to. Not in it: BytesStorageMetadata, whose values DCP would
# unpickle freely.
HARMLESS = {
    *(
        (f"{DCP}.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    ),
}


def write_shards(path: Path, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Write the tensors of `state` into a new folder beside `path`, all ranks together; what is to
    be saved at `path`.

    Plain tensors must be the same on every rank. Raises CheckpointError on every rank if one of
    them cannot write.
    """
    number = torch.zeros((), dtype=torch.int64, device=ranks.device)
    while ranks.is_main and path.with_name(f"{path.stem}.shards-{int(number)}").exists():
        number += 1
    folder = path.with_name(f"{path.stem}.shards-{int(ranks.sum(number))}")
    plain, tensors = _split(state)
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(str(folder)))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{folder}: rank {rank} cannot write ({cause}); the one before is untouched"
        ) from None
    sums = torch.zeros(ranks.world_size, 2, dtype=torch.int64, device=ranks.device)
    if (own := folder / _file_of(ranks.rank)).exists():
        sums[ranks.rank] = torch.tensor(_size_and_sum(own))
    files = {
        _file_of(rank): tuple(pair) for rank, pair in enumerate(ranks.sum(sums).tolist()) if pair[0]
    }
    if ranks.is_main:
        files[METADATA] = _size_and_sum(folder / METADATA)
    return {**plain, "shards": {"folder": folder.name, "files": files}}


def check_shards(path: Path, shards: dict[str, Any]) -> None:
    """Raise CheckpointError unless every file that `shards` of the checkpoint `path` names is there
    and whole.
    """
    try:
        files = {
            _folder(path, shards) / Path(name).name: (size, crc)
            for name, (size, crc) in shards["files"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path}: a PyTorch file, but not a nanonorm checkpoint") from None
    for file, (size, crc) in files.items():
        if not file.exists():
            raise CheckpointError(
                f"{path}: its shard {file} is missing: copy it too, or use another checkpoint"
            )
        if file.stat().st_size != size or _size_and_sum(file)[1] != crc:
            raise CheckpointError(f"{path}: its shard {file} is torn: use another checkpoint")


def read_state(
    path: Path, state: dict[str, Any], like: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """The whole `state` of a sharded checkpoint that has been checked: tensors on the CPU; or,
    where `like` has a sharded tensor for the name, this rank's share of it alone.
    """
    reader = _Reader(str(_folder(path, state["shards"])))
    try:
        tensors = {}
        for name, entry in reader.read_metadata().state_dict_metadata.items():
            whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            tensors[name] = _empty(whole, (like or {}).get(name))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")
            dcp.load(tensors, storage_reader=reader, no_dist=True)  # each rank for itself
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{reader.path / METADATA}: {error}: not a nanonorm checkpoint"
        ) from None
    except (Exception, CheckpointException) as error:  # written by another version, or foreign
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise CheckpointError(
            f"{reader.path}: DCP cannot read it ({reason}): use another checkpoint"
        ) from None
    return _join(state, tensors)


def place_state(
    path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The whole `state` of the checkpoint `path`, either form, its tensors sharded as those of
    `model` and `optimizer` are (or not, as theirs).
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    like |= {
        f"optimizer/{i}/{key}": p
        for i, p in enumerate(parameters)
        for key in ("exp_avg", "exp_avg_sq")
    }
    if "shards" in state:
        return read_state(path, state, like)
    plain, tensors = _split(state)
    return _join(plain, {name: _cut(tensor, like.get(name)) for name, tensor in tensors.items()})


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(plain values, tensors by name) of a checkpoint's dict."""
    optimizer = state["optimizer"]
    tensors = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    tensors |= {
        f"optimizer/{i}/{k}": tensor
        for i, entry in optimizer["state"].items()
        for k, tensor in entry.items()
    }
    plain = {name: value for name, value in state.items() if name != "model"}
    return {**plain, "optimizer": {"param_groups": optimizer["param_groups"]}}, tensors


def _join(plain: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What _split took apart."""
    model: dict[str, Tensor] = {}
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, key = name.split("/", 1)
        if kind == "model":
            model[key] = tensor
        else:
            index, key = key.split("/")
            states.setdefault(int(index), {})[key] = tensor
    optimizer = {
        "state": dict(sorted(states.items())),
        "param_groups": plain["optimizer"]["param_groups"],
    }
    rest = {name: value for name, value in plain.items() if name != "shards"}
    return {**rest, "model": model, "optimizer": optimizer}


def _empty(whole: Tensor, like: Tensor | None) -> Tensor:
    """Room for `whole` on the CPU, or for this rank's share of it where `like` is such a tensor
    sharded.
    """
    if isinstance(like, DTensor) and like.shape == whole.shape:
        return torch.empty_like(like, dtype=whole.dtype)
    return torch.empty_like(whole, device="cpu")


def _cut(tensor: Tensor, like: Tensor | None) -> Tensor:
    """This rank's share of a whole tensor, in memory of its own, where `like` is such a tensor
    sharded.
    """
    share = _empty(tensor, like)
    if not isinstance(share, DTensor):
        return tensor
    whole = tensor.to(share.device)
    return share.copy_(
        distribute_tensor(whole, share.device_mesh, share.placements, src_data_rank=None)
    )


def _folder(path: Path, shards: dict[str, Any]) -> Path:
    return path.with_name(Path(shards["folder"]).name)  # beside the checkpoint and nowhere else


def _file_of(rank: int) -> str:
    """DCP's name for the one file that `rank` writes."""
    return f"__{rank}_0.distcp"


def _size_and_sum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 22):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return size, crc


class _Reader(dcp.FileSystemReader):
    """DCP's reader, which unpickles the metadata of a checkpoint freely; this one makes harmless
    classes only.

    The tensors themselves DCP reads with weights_only.
    """

    def read_metadata(self, *words: Any, **names: Any) -> Metadata:
        with open(self.path / METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("no metadata of DCP")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is no tensor")
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in HARMLESS or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"holds {module}.{name}, more than tensors and plain values")
