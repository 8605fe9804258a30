"""Sharded checkpoints: each rank writes its share of the tensors, through
torch.distributed.checkpoint (DCP).

ckpt_last.pt is still the one file that names a checkpoint. It holds the plain values, and says
where the tensors are:

    ckpt_last.pt         {..., "shards": {"folder": "ckpt_last.shards-0",
                                          "files": {NAME: (bytes, crc32), ...}}}
    ckpt_last.shards-0/  .metadata  __0_0.distcp  __1_0.distcp  ...

The folder is written first, under a new name, because a rename cannot replace a folder that is not
empty. ckpt_last.pt is replaced last. So after a crash at any moment it names a whole checkpoint,
the old one or the new one. Tensors are called model/NAME and optimizer/INDEX/KEY. Any number of
ranks can read what any other number wrote.
"""

import pickle
import shutil
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
from common.errors import CheckpointError, cannot_write
from common.output import refused

METADATA = ".metadata"
DCP = "torch.distributed.checkpoint"
METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "ChunkStorageMetadata",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
# (module, name) of all that the metadata of DCP may be unpickled to. BytesStorageMetadata is not
# among them: DCP would unpickle its values without any check.
HARMLESS = {
    *((f"{DCP}.metadata", name) for name in METADATA_CLASSES),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    # from Python 3.13 on
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


# ------------------------------------------------------------------------------------------- write


def write_shards(path: Path, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Write the tensors of `state` into a new folder next to `path`. All ranks must call it.

    Args:
        path: where the checkpoint's file will be.
        state: the checkpoint. Tensors that are not sharded must be the same on every rank.
        ranks: this process and the others.

    Returns:
        What to save at `path`: plain values, and where the tensors are.

    Raises:
        CheckpointError: on every rank, if one of them cannot write.
    """
    folder = _new_folder(path, ranks)
    plain, tensors = _split(state)
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(str(folder)))
    except CheckpointException as error:
        # DCP collects the failures of all ranks; one is enough for the message.
        rank, (cause, _) = next(iter(error.failures.items()))
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        problem = refused(cause) or OSError(str(cause))
        kept = "the previous checkpoint is untouched"
        everyone = CheckpointError(cannot_write(f"{folder}: by rank {rank}", problem, kept))
        everyone.on_every_rank = True
        raise everyone from None
    files = _written_files(folder, ranks)
    return {**plain, "shards": {"folder": folder.name, "files": files}}


def _new_folder(path: Path, ranks: Ranks) -> Path:
    """Choose a folder that does not exist yet, the same on all ranks."""
    number = torch.zeros((), dtype=torch.int64, device=ranks.device)
    if ranks.is_main:
        while path.with_name(f"{path.stem}.shards-{int(number)}").exists():
            number += 1
    ranks.sum(number)  # the others have 0
    return path.with_name(f"{path.stem}.shards-{int(number)}")


def _written_files(folder: Path, ranks: Ranks) -> dict[str, tuple[int, int]]:
    """Collect name -> (bytes, crc32) of all files that the ranks have written."""
    # (ranks, 2): each rank fills its own row, and the sum over ranks is all of them.
    sums = torch.zeros(ranks.world_size, 2, dtype=torch.int64, device=ranks.device)
    own = folder / _file_of(ranks.rank)
    if own.exists():  # a rank without a share writes no file
        sums[ranks.rank] = torch.tensor(_size_and_sum(own))
    files = {}
    for rank, (size, crc) in enumerate(ranks.sum(sums).tolist()):
        if size:
            files[_file_of(rank)] = (size, crc)
    if ranks.is_main:
        files[METADATA] = _size_and_sum(folder / METADATA)
    return files


# -------------------------------------------------------------------------------------------- read


def check_shards(path: Path, shards: dict[str, Any]) -> None:
    """Check that every file of `shards`, an entry of the checkpoint `path`, is there and whole.

    Raises:
        CheckpointError: names the first file that is missing or torn.
    """
    try:
        folder = _folder(path, shards)
        files = {
            folder / Path(name).name: (size, crc) for name, (size, crc) in shards["files"].items()
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
    """Read the tensors of a sharded checkpoint.

    Args:
        path: the checkpoint's file.
        state: what it holds, after check_shards.
        like: tensors by name; of one that is sharded here, only this rank's share is read.

    Returns:
        The checkpoint's dict with all tensors; those that are not sharded here are on the CPU.
    """
    reader = _Reader(str(_folder(path, state["shards"])))
    like = like or {}
    try:
        # on meta: shapes without memory
        shapes = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        }
        # Before memory is taken for what the files cannot hold
        stored = sum(size for size, _ in state["shards"]["files"].values())
        if sum(shape.numel() * shape.element_size() for shape in shapes.values()) > stored:
            raise ValueError("more numbers than the files have")
        tensors = {name: _empty(shape, like.get(name)) for name, shape in shapes.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")
            # Each rank reads for itself.
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        return _join(state, tensors)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{reader.path / METADATA}: {error}: not a nanonorm checkpoint"
        ) from None
    except (Exception, CheckpointException) as error:  # of another version, or of another program
        lines = str(error).splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        raise CheckpointError(
            f"{reader.path}: DCP cannot read it ({reason}): use another checkpoint"
        ) from None


def place_state(
    path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Complete the `state` of the checkpoint `path`, of either form, for a run that resumes.

    Returns:
        The checkpoint's dict. A tensor is sharded if that of `model` or `optimizer` is.
    """
    like = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        # Moments have the shape of their parameter.
        like[f"optimizer/{index}/exp_avg"] = parameter
        like[f"optimizer/{index}/exp_avg_sq"] = parameter
    if "shards" in state:
        return read_state(path, state, like)
    plain, tensors = _split(state)
    tensors = {name: _cut(tensor, like.get(name)) for name, tensor in tensors.items()}
    return _join(plain, tensors)


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Separate a checkpoint's dict into plain values and tensors by name."""
    optimizer = state["optimizer"]
    tensors = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    for index, moments in optimizer["state"].items():
        for key, tensor in moments.items():
            tensors[f"optimizer/{index}/{key}"] = tensor
    plain = {name: value for name, value in state.items() if name != "model"}
    plain["optimizer"] = {"param_groups": optimizer["param_groups"]}
    return plain, tensors


def _join(plain: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put together what _split has separated."""
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
    """Allocate memory for `whole` on the CPU, or for this rank's share if `like` is sharded."""
    if isinstance(like, DTensor) and like.shape == whole.shape:
        return torch.empty_like(like, dtype=whole.dtype)
    return torch.empty_like(whole, device="cpu")


def _cut(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Cut this rank's share out of a whole tensor, as a copy, if `like` is sharded."""
    share = _empty(tensor, like)
    if not isinstance(share, DTensor):
        return tensor
    whole = tensor.to(share.device)
    # Every rank has the whole tensor, so none of them needs to send it.
    cut = distribute_tensor(whole, share.device_mesh, share.placements, src_data_rank=None)
    return share.copy_(cut)


# ------------------------------------------------------------------------------------------- files


def _folder(path: Path, shards: dict[str, Any]) -> Path:
    # A name only: a checkpoint must not make us read elsewhere.
    return path.with_name(Path(shards["folder"]).name)


def _file_of(rank: int) -> str:
    """Name the one file that `rank` writes, as DCP does."""
    return f"__{rank}_0.distcp"


def _size_and_sum(path: Path) -> tuple[int, int]:
    """Compute (bytes, CRC-32) of a file."""
    size = 0
    crc = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 22):
            size += len(part)
            crc = zlib.crc32(part, crc)
    return size, crc


class _Reader(dcp.FileSystemReader):
    """DCP's reader, except that the metadata cannot run code.

    DCP unpickles the metadata without any check, and every entry that the metadata calls bytes.
    Both would run foreign code. Here the metadata may hold harmless classes only, and no such
    entries. The tensors themselves DCP reads with weights_only.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self.path / METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("no metadata of DCP")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is no tensor")
        return metadata


class _Unpickler(pickle.Unpickler):
    """Unpickles HARMLESS classes and dtypes only."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"holds {module}.{name}, more than tensors and plain values")
