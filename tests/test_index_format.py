"""The files of an index, read by what docs/index_format.md says of them and by nothing of the engine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from engine.ops.quantize import dequantize
from engine.reference.quantize import QuantizedTokens
from tests.index_cases import images, index_at, names

IDS = ["plain", *names(0, 6), "\udcef.png", "ünïcode"]


def section(folder: Path, described: dict, name: str) -> np.ndarray:
    facts = described["sections"][name]
    dtype = {"bfloat16": "int16"}.get(facts["dtype"], facts["dtype"])
    count = int(np.prod(facts["shape"]))
    data = (folder / facts["file"]).read_bytes()
    return np.frombuffer(data, dtype=f"<{np.dtype(dtype).str[1:]}", count=count, offset=facts["offset"]).reshape(
        facts["shape"]
    )


@pytest.mark.parametrize("store", ["int8", "bf16"])
def test_an_index_is_read_by_its_description(tmp_path, store):
    index = index_at(tmp_path / "index", store=store, segment_bytes=2200)
    given = images(IDS)
    index.add(given, metadata={"n": range(len(IDS))})
    index.delete(["plain"])
    index.delete([IDS[5], IDS[3]])
    folder = tmp_path / "index"

    text = (folder / "manifest.json").read_text(encoding="ascii")
    outer = json.loads(text)
    manifest = outer["manifest"]
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert text == f'{{"crc32":"{zlib.crc32(body.encode()):08x}","format_version":1,"manifest":{body}}}\n'
    assert (manifest["store"], manifest["dim"], manifest["fingerprint"]) == (store, 24, "fake-1")
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(manifest["schema"])))
    assert schema == pa.schema([("n", pa.int64())]) and len(manifest["segments"]) > 1

    gone = tombstones((folder / manifest["deleted"]).read_bytes(), manifest)
    assert gone == {0, 3, 5}
    first = 0
    for entry in manifest["segments"]:
        place = folder / "segments" / entry["name"]
        data = (place / "segment.json").read_bytes()
        assert (len(data), zlib.crc32(data)) == (entry["size"], entry["crc32"])
        described = json.loads(data)
        assert described["rows"] == entry["rows"]
        assert sorted(described["files"]) == sorted(p.name for p in place.iterdir() if p.name != "segment.json")
        for name, facts in described["files"].items():
            whole = (place / name).read_bytes()
            blocks = [zlib.crc32(whole[at : at + 2**20]) for at in range(0, len(whole), 2**20)]
            assert (len(whole), blocks) == (facts["size"], facts["crc32"])
        check_rows(place, described, given, first, store)
        first += entry["rows"]
    assert first == len(IDS)


def tombstones(data: bytes, manifest: dict) -> set[int]:
    bits = data[64 * 512 :]
    assert zlib.crc32(bits) == manifest["deleted_crc32"]
    assert len(bits) == sum(-(-entry["rows"] // 8) for entry in manifest["segments"]) and not any(bits)
    gone: set[int] = set()
    for slot in range(64):
        number, count, crc, zero = struct.unpack_from("<IIII", data, slot * 512)
        if number == 0:
            assert not any(data[slot * 512 : 64 * 512])
            break
        body = data[slot * 512 + 16 : slot * 512 + 16 + 4 * count]
        assert number == slot + 1 and zero == 0 and crc == zlib.crc32(struct.pack("<I", count) + body)
        gone |= set(np.frombuffer(body, "<u4").tolist())
    return gone


def check_rows(place: Path, described: dict, given, first: int, store: str) -> None:
    rows = described["rows"]
    text = section(place, described, "ids.bytes").tobytes()
    offsets = section(place, described, "ids.offsets")
    ids = [text[offsets[row] : offsets[row + 1]] for row in range(rows)]
    assert [name.decode("utf-8", "surrogateescape") for name in ids] == IDS[first : first + rows]
    hashes, order = (section(place, described, f"ids.{part}") for part in ("hashes", "rows"))
    wanted = [int.from_bytes(hashlib.blake2b(ids[row], digest_size=8).digest(), "little") for row in order]
    assert hashes.tolist() == wanted == sorted(wanted) and sorted(order) == list(range(rows))
    own = slice(first, first + rows)
    assert np.array_equal(section(place, described, "global"), given.embedding[own].numpy())
    for name, value in (("sizes", given.sizes), ("views", given.views)):
        assert np.array_equal(section(place, described, name), value[own].numpy())
    assert section(place, described, "grids").tolist() == [[2, 3]] * rows
    for kind, values in (("windows", given.regions), ("patches", given.patches)):
        bounds = section(place, described, f"{kind}.cu_seqlens")
        codes = section(place, described, f"{kind}.codes")
        mask = given.region_mask[own] if kind == "windows" else torch.ones(rows, 6, dtype=torch.bool)
        assert np.diff(bounds).tolist() == mask.sum(dim=1).tolist() and len(codes) == bounds[-1]
        if store == "int8":
            scales = torch.from_numpy(section(place, described, f"{kind}.scales").copy())
            found = dequantize(QuantizedTokens(torch.from_numpy(codes.copy()), scales))
        else:
            found = torch.from_numpy(codes.copy()).view(torch.bfloat16).float()
        assert (found - values[own][mask]).abs().max() < 0.01
    boxes = section(place, described, "boxes")
    assert np.array_equal(boxes, given.boxes[own][given.region_mask[own]].numpy())
    table = parquet.read_table(place / "metadata.parquet")
    assert table.column("n").to_pylist() == list(range(first, first + rows))


def test_the_table_in_the_readme_is_what_the_files_hold(tmp_path):
    index = index_at(tmp_path / "index")
    given = images(IDS)
    index.add(given, metadata={"n": range(len(IDS))})
    index.delete([IDS[4], IDS[1]])
    folder = tmp_path / "index"
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in readme.splitlines() if line.startswith("| `")]
    said = {name.split("`")[1]: text for name, text, *_ in lines}

    outer = json.loads((folder / "manifest.json").read_text(encoding="ascii"))
    text = json.dumps(outer["manifest"], sort_keys=True, separators=(",", ":"))
    form = re.match(r"ASCII `(.*?)`, line end", said["manifest.json"]).group(1)
    wanted = form.replace("<8 hex>", f"{zlib.crc32(text.encode()):08x}").replace("{…}", text) + "\n"
    assert (folder / "manifest.json").read_text(encoding="ascii") == wanted

    slots, size = map(int, re.match(r"(\d+) slots of (\d+):", said["deleted-<generation>.bin"]).groups())
    data = (folder / outer["manifest"]["deleted"]).read_bytes()
    assert len(data) == slots * size + sum(-(-entry["rows"] // 8) for entry in outer["manifest"]["segments"])
    slot, n, crc, zero, *rows = struct.unpack_from("<6I", data)
    assert (slot, n, zero, set(rows)) == (1, 2, 0, {4, 1}) and crc == zlib.crc32(data[4:8] + data[16:24])

    step = int(re.search(r"multiples of (\d+)", readme).group(1))
    parts = dict(re.findall(r"`(\S+)` (\w+ \([^)]*\))", said["rows.bin"]))
    kinds = said["<kind>.codes"]
    first = 0
    for entry in outer["manifest"]["segments"]:
        place = folder / "segments" / entry["name"]
        described = json.loads((place / "segment.json").read_bytes())
        assert all(f"`{key}`" in said["segments/<number>/segment.json"] for key in ("rows", "files", "sections"))
        own = slice(first, first + entry["rows"])
        sizes = {
            "rows": entry["rows"], "rows+1": entry["rows"] + 1, "dim": 24, "2": 2, "4": 4,
            "total": sum(len(name.encode("utf-8", "surrogateescape")) for name in IDS[own]),
        }  # fmt: skip
        found = {name for name in described["sections"] if not name.endswith(".codes")}
        assert found == {f.replace("<kind>", kind) for f in parts for kind in ("windows", "patches")}
        for name in found:
            kind = name.split(".")[0]
            vectors = int(given.region_mask[own].sum()) if kind in ("windows", "boxes") else 6 * entry["rows"]
            dtype, shape = parts.get(name, parts.get(name.replace(kind, "<kind>"))).split(" ", 1)
            wanted = [{**sizes, "windows": vectors, "vectors": vectors}[word] for word in shape.strip("()").split(", ")]
            facts = described["sections"][name]
            assert (facts["dtype"], facts["shape"], facts["offset"] % step) == (dtype, wanted, 0), name
        for kind in ("windows", "patches"):
            assert f"`{kind}`" in kinds and (place / f"{kind}.codes").stat().st_size % 24 == 0
            assert described["sections"][f"{kind}.codes"]["dtype"] in kinds
        assert np.array_equal(section(place, described, "global"), given.embedding[own].numpy())
        assert parquet.read_metadata(place / "metadata.parquet").num_rows == entry["rows"]
        first += entry["rows"]
    assert first == len(IDS)
