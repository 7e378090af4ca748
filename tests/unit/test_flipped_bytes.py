"""A bit that flips in the files around a Megatron checkpoint's tensors is found, or changes nothing that is read."""

import io
import random
from zipfile import ZipFile

import pytest
import torch
from made_checkpoints import CONFIGS, tensors_of, write

from models.checkpoint_index import METADATA, read_index
from models.checkpoint_reader import COMMON, MegatronReader, stored_digests
from models.convert_import import hf_to_megatron
from models.convert_inspect import inspect_checkpoint
from models.convert_megatron import ImportOptions

CONFIG = CONFIGS["llama_tied"] | {"num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 4}
FLIPS, SEED = 400, 0


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flips")
    hf = write(folder / "hf", CONFIG, tensors_of(CONFIG))
    hf_to_megatron(hf, folder / "megatron", ImportOptions(fsync=False))
    return folder / "megatron"


@pytest.fixture
def megatron(written):
    kept = {name: (written / name).read_bytes() for name in (METADATA, COMMON)}
    yield written
    for name, data in kept.items():
        (written / name).write_bytes(data)


def flips(whole: bytes):
    """The same bytes with one bit changed, for every byte or for a few hundred of them."""
    draw = random.Random(SEED)
    places = range(len(whole)) if len(whole) <= FLIPS else sorted(draw.sample(range(len(whole)), FLIPS))
    for at in places:
        yield at, whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :]


def read(folder):
    """Every tensor that the digests speak of, as a conversion reads it: shapes, dtypes and all bytes."""
    digests = stored_digests(folder)
    reader = MegatronReader(folder, digests)
    tensors = {key: reader.stored(key) for key in digests}
    assert reader.weights() == digests.keys()
    return {
        key: (tensor.shape, tensor.dtype, [(chunk.offset, reader.chunk(tensor, chunk).tolist()) for chunk in tensor.chunks])
        for key, tensor in tensors.items()
    }


def test_a_flipped_bit_of_the_metadata(megatron):
    whole, before = (megatron / METADATA).read_bytes(), read(megatron)
    refused = 0
    for at, broken in flips(whole):
        (megatron / METADATA).write_bytes(broken)
        try:
            index = read_index(megatron)
        except ValueError as error:
            assert str(error).startswith(f"{megatron / METADATA} cannot be read: "), at
            assert "\n" not in str(error)
            refused += 1
            with pytest.raises(ValueError, match=METADATA):
                inspect_checkpoint(megatron)
            continue
        try:
            assert read(megatron) == before, at
        except ValueError as error:
            assert any(name in str(error) for name in (str(megatron), *index.tensors)), at
            assert "\n" not in str(error)
    assert refused > FLIPS // 4


def plant(pickled: bytes) -> bytes:
    """Behind the protocol's two bytes."""
    return b"\x80\x04" + pickled


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (plant(b"\x95" + (1 << 60).to_bytes(8, "little") + b"N."), "a frame of"),
        (plant(b"Nr" + (1 << 31).to_bytes(4, "little") + b"."), "number 2147483648 in the memo"),
        (plant(b"Np4000000000\n."), "number 4000000000 in the memo"),
        (plant(b"\x8e" + (1 << 62).to_bytes(8, "little") + b"."), "but only 1 remain"),
        (plant(b"cnowhere\nMetadata\n."), "No module named 'nowhere'"),
        (plant(b"ctorch\nMetadata\n."), "Can't get attribute 'Metadata'"),
        (plant(b"X\x01\x00\x00\x00\xff."), "can't decode byte"),
        (plant(b"N."), "no attribute"),
        (b"Vtext\n.", "no attribute"),
    ],
    ids=["frame", "memo", "text memo", "bytes", "module", "name", "text", "none", "string"],
)
def test_metadata_that_asks_for_too_much_or_is_something_else(megatron, data, says):
    (megatron / METADATA).write_bytes(data)
    with pytest.raises(ValueError, match=rf"\{METADATA} cannot be read: .*{says}"):
        read_index(megatron)


def test_metadata_whose_objects_lack_what_they_should_hold(megatron):
    whole = (megatron / METADATA).read_bytes()
    for name in (b"state_dict_metadata", b"offsets", b"sizes", b"relative_path", b"properties"):
        assert whole.count(name) == 1
        (megatron / METADATA).write_bytes(whole.replace(name, name[:-1] + b"~"))
        with pytest.raises(ValueError, match=rf"\{METADATA} cannot be read: .*'{name.decode()}'"):
            read_index(megatron)


def members(data: bytes):
    with ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_flipped_bit_of_the_common_state(megatron):
    whole = (megatron / COMMON).read_bytes()
    refused = 0
    for at, broken in flips(whole):
        (megatron / COMMON).write_bytes(broken)
        try:
            MegatronReader(megatron)
        except ValueError as error:
            assert str(megatron / COMMON) in str(error), at
            assert "\n" not in str(error)
            refused += 1
        else:
            assert members(broken) == members(whole), at
    assert refused > FLIPS // 4


def test_a_member_name_that_is_no_text(megatron):
    whole = (megatron / COMMON).read_bytes()
    at = whole.rindex(b"PK\x01\x02")
    flagged = whole[: at + 8] + (0x800).to_bytes(2, "little") + whole[at + 10 : at + 46] + b"\xff" + whole[at + 47 :]
    (megatron / COMMON).write_bytes(flagged)
    with pytest.raises(ValueError, match=rf"{COMMON} is no file of torch.save: 'utf-8' codec can't decode"):
        MegatronReader(megatron)


def test_the_undamaged_one_is_read(megatron):
    found = read(megatron)
    assert found
    assert all(dtype is torch.float32 for _, dtype, _ in found.values())
