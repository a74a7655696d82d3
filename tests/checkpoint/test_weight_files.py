"""Weight files that were made to harm: nothing in them is run, no claim in them takes memory, each has its one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import formats
from safetensors.torch import save_file
from torch import Tensor

from tpllama.checkpoint.matching import check_tensors
from tpllama.checkpoint.open import open_checkpoint
from tpllama.checkpoint.weight_files import open_weight_file
from tpllama.config import UserError
from tpllama.llama_config import LlamaConfig

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "vocab_size": 3,
    "hidden_size": 4,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (3, 4),
    "model.norm.weight": (4,),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.post_attention_layernorm.weight": (4,),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 4),
    "model.layers.0.mlp.gate_proj.weight": (5, 4),
    "model.layers.0.mlp.up_proj.weight": (5, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 5),
}
GIGABYTES = 1 << 31


# A pickle never runs.


class Runs:
    """Pickled, it is a command that makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def save_zip(content: object, path: Path) -> None:
    torch.save(content, path)


def save_legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def save_plain(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def save_tar(content: object, path: Path) -> None:
    """As torch before 0.1.10 did."""
    data = pickle.dumps(content)
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("save", [save_zip, save_legacy, save_plain, save_tar])
@pytest.mark.parametrize("where", ["value", "beside", "whole"])
@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "consolidated.00.pth", "model-00001-of-00001.bin", "hf_model_0001_0.pt", "adapter_model.bin"],
)
def test_nothing_in_a_pickle_is_run(
    tmp_path: Path, fails: Any, save: Callable[[object, Path], None], where: str, name: str
) -> None:
    marker, path, base = tmp_path / "it_ran", tmp_path / "model", tmp_path / "base"
    for folder in (path, base):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
        (folder / "params.json").write_text(json.dumps(formats.meta_params(CONFIG)))
    save_file({key: torch.ones(shape) for key, shape in SHAPES.items()}, base / "model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    evil = Runs(marker)
    save({"value": {"x": evil}, "beside": {"x": torch.ones(1), "y": [evil]}, "whole": evil}[where], path / name)
    given = str(base) if name.startswith("adapter") else None
    fails(lambda: open_checkpoint(str(path), base=given), str(path / name))
    assert not marker.exists()
    with contextlib.suppress(Exception):  # the pickle is one that would
        (pickle.load if save is save_plain else partial(torch.load, weights_only=False))((path / name).open("rb"))
    assert marker.exists()


@pytest.mark.parametrize("module", ["torchao.quantization.evilTensor", "torchao.evil", "posix.system"])
def test_a_global_that_sounds_like_torchao_s(tmp_path: Path, fails: Any, module: str) -> None:
    place, name = module.rsplit(".", 1)
    code = f"c{place}\n{name}\n)R.".encode()
    write_archive(tmp_path / "a.bin", code, {})
    fails(lambda: open_weight_file(tmp_path / "a.bin"), str(tmp_path / "a.bin"))


# Claims about sizes.


class Storage:
    """What a pickle says of a storage: its record and number of elements."""

    def __init__(self, count: int = 2, key: str = "0", kind: str = "FloatStorage") -> None:
        self.said = ("storage", getattr(torch, kind), key, "cpu", count)


class Call:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Pickler(pickle.Pickler):
    extra: tuple[Any, ...] = ()

    def persistent_id(self, value: Any) -> Any:
        return value.said + self.extra if isinstance(value, Storage) else None


class LegacyPickler(Pickler):
    extra = (None,)


def tensor(size: Any = (2,), stride: Any = (1,), offset: int = 0, storage: Storage | None = None) -> Call:
    return Call(
        torch._utils._rebuild_tensor_v2, storage or Storage(), offset, size, stride, False, OrderedDict()
    )  # fmt: skip


def pickled(value: Any, pickler: type[Pickler] = Pickler) -> bytes:
    data = io.BytesIO()
    pickler(data, 2).dump(value)
    return data.getvalue()


def write_archive(path: Path, code: bytes, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """A file as torch.save's."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in {"data.pkl": code, "version": b"3\n", "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", data)


def write_crafted(path: Path, value: Any) -> None:
    write_archive(path, pickled({"x": value}), {"data/0": struct.pack("<2f", 1, 2)})


def write_crafted_legacy(path: Path, value: Any) -> None:
    start = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    parts = [pickle.dumps(part, 2) for part in start]
    parts += [pickled({"x": value}, LegacyPickler), pickle.dumps(["0"], 2), struct.pack("<q2f", 2, 1, 2)]
    path.write_bytes(b"".join(parts))


def parameter(value: Any) -> Call:
    return Call(torch._utils._rebuild_parameter, value, False, OrderedDict())


CLAIMS: dict[str, Any] = {
    "shape": tensor((10**12,)),
    "shape-of-gigabytes": tensor((GIGABYTES // 4,)),
    "shape-by-one": tensor((3,)),
    "shape-beyond-int64": tensor((2**64,)),
    "shape-overflowing": tensor((2**62, 4), (4, 1)),
    "shape-negative": tensor((-1,)),
    "stride": tensor((2,), (10**9,)),
    "stride-negative": tensor((2,), (-1,), 1),
    "stride-zero": tensor((10**6, 10**6), (0, 0)),
    "stride-zero-small": tensor((3,), (0,)),
    "stride-of-fewer": tensor((2, 1), (1,)),
    "offset": tensor(offset=10**6),
    "offset-by-one": tensor(offset=1),
    "offset-negative": tensor(offset=-1),
    "storage": tensor((10**15,), storage=Storage(10**15)),
    "storage-of-gigabytes": tensor((GIGABYTES // 4,), storage=Storage(GIGABYTES // 4)),
    "storage-negative": tensor(storage=Storage(-1)),
    "storage-missing": tensor(storage=Storage(key="1")),
    "storage-of-quantized": tensor(storage=Storage(kind="QInt8Storage")),
    "bytes": Call(bytearray, GIGABYTES),
    "without-storage": Call(torch.FloatTensor, GIGABYTES // 4),
    "parameter": parameter(tensor((10**12,))),
    "parameter-stride-zero": parameter(tensor((10**6, 10**6), (0, 0))),
    "meta": Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (2,), (1,), False),
    "wrapper": Call(
        torch._utils._rebuild_wrapper_subclass, torch.nn.Parameter, torch.float32, (2,), (1,), 0, torch.strided,
        torch.device("cpu"), False,
    ),
    "sparse": Call(
        torch._utils._rebuild_sparse_tensor, torch.sparse_coo,
        (tensor((1, 2), (2, 1), storage=Storage(kind="LongStorage", count=1)), tensor(), (10**12,)),
    ),
    "quantized": Call(
        torch._utils._rebuild_qtensor, Storage(kind="QInt8Storage"), 0, (2,), (1,), (torch.per_tensor_affine, 0.5, 0),
        False, OrderedDict(),
    ),
}  # fmt: skip


def header(entries: dict[str, Any] | bytes, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS: dict[str, bytes] = {
    "length": header({"x": entry()}, length=2**63),
    "length-of-gigabytes": header({"x": entry()}, length=GIGABYTES),
    "length-by-one": header({"x": entry()}, b"", length=10**3),
    "offsets-beyond": header({"x": entry(offsets=(0, 80))}),
    "offsets-of-gigabytes": header({"x": entry((GIGABYTES // 4,), (0, GIGABYTES))}),
    "offsets-reversed": header({"x": entry(offsets=(8, 0))}),
    "offsets-negative": header({"x": entry(offsets=(-8, 0))}),
    "overlap": header({"x": entry(), "y": entry()}),
    "overlap-in-part": header({"x": entry(), "y": entry((1,), (4, 8))}),
    "hole": header({"x": entry(), "y": entry(offsets=(16, 24))}, bytes(24)),
    "shape-negative": header({"x": entry((-2,))}),
    "shape-other": header({"x": entry((3,))}),
    "shape-huge": header({"x": entry((10**18,))}),
    "shape-overflowing": header({"x": entry((2**62, 2**62))}),
    "shape-beyond-int64": header({"x": entry((2**70,))}),
    "shape-of-text": header({"x": entry("ab")}),
    "dtype": header({"x": entry(dtype="F31")}),
    "whole-numbers": header({"x": entry(dtype="I32")}),
    "list": header(b"[1, 2]"),
    "nested": header(b"[" * 10**6),
    "no-text": header(b"\xff\xfe" * 50),
    "name": header({"x\ny": entry()}),
    "metadata": header({"x": entry(), "__metadata__": {"a": 1}}),
    "metadata-of-torchao": header({"x": entry(), "__metadata__": {"tensor_names": "{"}}),
    "metadata-of-nothing": header({"x": entry(), "__metadata__": {"tensor_names": '["y"]'}}),
    "metadata-nested": header({"x": entry(), "__metadata__": {"tensor_names": "[" * 10**5}}),
    "metadata-of-a-list": header({"x": entry(), "__metadata__": {"tensor_names": '["y"]', "y": "[1]"}}),
    "metadata-in-two-lines": header(
        {"x": entry(), "__metadata__": {"tensor_names": '["a.y"]', "a.y": json.dumps(
            {"_type": "T", "_data": {}, "_tensor_data_names": ["b\nc"]})}}),
    "trailing": header({"x": entry()}, bytes(16)),
    "nothing": b"",
}  # fmt: skip


def write_bombs(path: Path) -> list[Path]:
    """Archives that are small and say, or are, much."""
    zeros = bytes(1 << 28)
    write_archive(path / "deflated.pth", pickled({"x": tensor()}), {"data/0": zeros}, zipfile.ZIP_DEFLATED)
    code = pickled({"x": zeros})
    write_archive(path / "deflated-pickle.pth", code, {}, zipfile.ZIP_DEFLATED)
    # The same with a start that Python's zipfile does not mind, and torch's reader does.
    (path / "prefixed.pth").write_bytes(b"MZ" + (path / "deflated-pickle.pth").read_bytes())
    write_crafted(path / "sizes.pth", tensor((GIGABYTES // 4,), storage=Storage(GIGABYTES // 4)))
    # In the directory at the end, as in the local header, the sizes are the two numbers before the name's length.
    content = (path / "sizes.pth").read_bytes()
    for sign, place in ((b"PK\1\2", 20), (b"PK\3\4", 18)):
        starts = [i for i in range(len(content)) if content.startswith(sign, i)]
        at = next(i for i in starts if b"data/0" in content[i : i + 70]) + place
        content = content[:at] + struct.pack("<II", GIGABYTES - 1, GIGABYTES - 1) + content[at + 8 :]
    (path / "sizes.pth").write_bytes(content)
    return sorted(path.glob("*.pth"))


# Opens files in a process of its own: what each said, the time it took, and the memory it took beyond the others.
OPENER = """
import json, resource, sys, time
import torch, torchao.quantization
from pathlib import Path
from tpllama.checkpoint.weight_files import open_weight_file
from tpllama.config import UserError
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30),) * 2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.stdin.read().split():
    start = time.monotonic()
    try:
        file = open_weight_file(Path(path))
        said = f"opened {file.shapes}"
    except UserError as error:
        said = str(error)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([path, said, time.monotonic() - start, (now - peak) * 1024]))
    peak = now
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, float, int]]:
    path = tmp_path_factory.mktemp("crafted")
    for name, claim in CLAIMS.items():
        write_crafted(path / f"zip.{name}.bin", claim)
        write_crafted_legacy(path / f"legacy.{name}.bin", claim)
    for name, content in HEADERS.items():
        (path / f"header.{name}.safetensors").write_bytes(content)
    (path / "bombs").mkdir()
    files = [*write_bombs(path / "bombs"), *sorted(path.glob("*.*"))]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OPENER], input="\n".join(map(str, files)), capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(line[0]).stem: tuple(line) for line in lines}


CASES = [f"{kind}.{name}" for kind in ("zip", "legacy") for name in CLAIMS]
CASES += [f"header.{name}" for name in HEADERS]
CASES += ["deflated", "deflated-pickle", "prefixed", "sizes"]


@pytest.mark.parametrize("case", CASES)
def test_a_claim_is_an_error_that_costs_nothing(opened: dict[str, Any], case: str) -> None:
    path, said, seconds, memory = opened[case]
    assert said.startswith("found ")
    assert path in said
    assert "expected" in said
    assert "\n" not in said
    assert len(said) < 800
    assert seconds < 2
    assert memory < 100 << 20


def test_the_crafted_files_differ_from_good_ones_by_their_claim_alone(tmp_path: Path) -> None:
    """What the tests above write is a file that would open."""
    for write in (write_crafted, write_crafted_legacy):
        for good in (tensor(), parameter(tensor()), tensor((2, 1), (1, 1)), tensor((1,), (1,), 1)):
            write(tmp_path / "a.bin", good)
            file = open_weight_file(tmp_path / "a.bin")
            assert file.read("x", (slice(0, 1),)).flatten().tolist() == [1.0 if good.call[1][1] != 1 else 2.0]
    (tmp_path / "a.safetensors").write_bytes(header({"x": entry()}))
    assert open_weight_file(tmp_path / "a.safetensors").shapes == {"x": (2,)}


@pytest.mark.parametrize("names", [{"tensor_data_names": ["x"]}, {"detach": 1, "storage_offset": 2, "clone": 3}])
def test_attributes_of_a_tensor_are_not_looked_at(tmp_path: Path, names: dict[str, Any]) -> None:
    inner = tensor().call
    odd = Call(torch._tensor._rebuild_from_type_v2, inner[0], torch.nn.Parameter, inner[1], names)
    write_crafted(tmp_path / "a.bin", odd)
    file = open_weight_file(tmp_path / "a.bin")
    assert (file.shapes, file.stored) == ({"x": (2,)}, {})
    read = file.read("x", (slice(0, 2),))
    assert type(read) is Tensor
    assert (read.tolist(), read.requires_grad) == ([1.0, 2.0], False)


def test_a_file_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(2)}, tmp_path / "a.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_weight_file(tmp_path / "a.bin").shapes == {"x": (2,)}


def test_a_parameter_is_read_without_its_gradient(tmp_path: Path) -> None:
    torch.save({"x": torch.nn.Parameter(torch.ones(2))}, tmp_path / "a.bin")
    read = open_weight_file(tmp_path / "a.bin").read("x", (slice(0, 2),))
    assert type(read) is Tensor
    assert not read.requires_grad


# Damage.


def bits_of(path: Path) -> list[int]:
    """Places of the bits of a file that say what it holds: all but the weights' own."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return list(range(8 * (8 + int.from_bytes(content[:8], "little"))))
    if not zipfile.is_zipfile(path):
        return list(range(8 * len(content)))
    with zipfile.ZipFile(path) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
        end = archive.start_dir
    pickle_bits = range(8 * entry.header_offset, 8 * (entry.header_offset + 100 + entry.file_size))
    return [*pickle_bits, *range(8 * end, 8 * len(content))]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("model.safetensors", 3),
        ("pytorch_model.bin", 13),
        pytest.param("pytorch_model.legacy.bin", 13, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_is_an_error_or_changes_no_shape(tmp_path: Path, name: str, step: int) -> None:
    torch.manual_seed(0)
    state = {key: torch.randn(shape) for key, shape in SHAPES.items()}
    path = tmp_path / name.replace(".legacy", "")
    if name.endswith("safetensors"):
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization="legacy" not in name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    config, content = LlamaConfig.from_hf({"model_type": "llama", **CONFIG}), path.read_bytes()
    check_tensors(config, SHAPES, open_checkpoint(str(tmp_path)).tensors)
    errors = 0
    for bit in bits_of(path)[::step]:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        error, tensors = "", {}
        try:
            tensors = open_checkpoint(str(tmp_path)).tensors
            check_tensors(config, SHAPES, tensors)
        except UserError as caught:
            error = str(caught)
            errors += 1
        assert error.startswith("found ") or {key: info.shape for key, info in tensors.items()} == SHAPES, bit
        assert "\n" not in error, bit
    assert errors > 100
