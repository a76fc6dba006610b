"""Transform coding against NumPy: what is decoded, which codes are chosen, what is exact, and how bits are allotted."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from blocks import DTYPES, make_key, make_sparse, same, tier_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.codecs import Bases
from ragcache.codecs.basis import basis_name
from ragcache.codecs.block_file import read_block, write_block
from ragcache.errors import BasisError, ConfigError, DamagedBlockError, PinError, UnencodableBlockError
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.kv.sparse_block import keep
from ragcache.store.kv_store import KVStore
from ragcache_papers.kvtc import KvtcCodec
from ragcache_papers.kvtc_basis import Basis, Recent
from ragcache_papers.kvtc_fit import STATES, allot, fit_basis

Array = np.ndarray[Any, np.dtype[Any]]
LAYERS, HEADS, WIDTH = 3, 2, 8
RATIO, FEATURES = 8.0, 2 * HEADS * WIDTH  # two layers share a transform
WIDTHS = (8, 4, 2)


def passage(seed: int, num_tokens: int = 200, dtype: torch.dtype = torch.float32) -> KVBlock:
    """Return a block whose layers and heads follow the same few hidden directions; layers differ in scale."""
    fixed, rng = np.random.default_rng(7), np.random.default_rng(seed)
    parts = []
    for _ in range(2):
        mixing = fixed.standard_normal((10, LAYERS * HEADS * WIDTH)) * (0.7 ** np.arange(10))[:, None]
        means = fixed.uniform(-3, 3, LAYERS * HEADS * WIDTH)
        rows = rng.standard_normal((num_tokens, 10)) @ mixing + 0.02 * rng.standard_normal((num_tokens, len(means)))
        shaped = (rows + means).reshape(num_tokens, LAYERS, HEADS, WIDTH).transpose(1, 2, 0, 3)
        parts.append(shaped * np.array([1, 5, 30]).reshape(-1, 1, 1, 1))
    return KVBlock(*(torch.from_numpy(part).to(dtype) for part in parts))


@pytest.fixture(scope="module")
def basis() -> KVBlock:
    return fit_basis([passage(seed) for seed in range(12)], RATIO, FEATURES)


@pytest.fixture
def codec(basis: KVBlock) -> KvtcCodec:
    bases = Bases()
    bases.add(basis)
    return KvtcCodec(bases)


def groups_by_hand(rows: Array) -> list[tuple[list[int], dict[str, Any]]]:
    """Return each group's layers, and its mean, scale, limit and components with their widths."""
    found = []
    for number in sorted(set(rows[:, 0, 0, 0])):
        layers = [layer for layer in range(len(rows)) if rows[layer, 0, 0, 0] == number]
        flat = rows[layers].transpose(2, 0, 1, 3).reshape(rows.shape[2], -1).astype(np.float64)
        components: list[Array] = []
        widths: list[int] = []
        kind = 0
        for row in flat[4:]:
            if not row.any():
                kind += 1
            elif kind < 3:
                components.append(row)
                widths.append(WIDTHS[kind])
        own = {"mean": flat[1], "scale": flat[2], "limit": flat[3, 0], "components": np.array(components)}
        found.append((layers, {**own, "widths": np.array(widths)}))
    return found


def codes_by_hand(tensors: dict[str, Array], number: int, widths: Array, num_tokens: int) -> Array:
    """Return the codes, read one by one: with b bits, token t of n is in byte t % rows of its component, at the (t //
    rows)th position from the lowest bits.
    """
    codes = []
    for rank, bits in enumerate(WIDTHS):
        ends = [0, *tensors["ends"]]
        frame = tensors["stream"][ends[3 * number + rank] : ends[3 * number + rank + 1]].tobytes()
        data = zstandard.ZstdDecompressor().decompress(frame)
        rows, count = -(-num_tokens * bits // 8), int((widths == bits).sum())
        packed = np.frombuffer(data, dtype=np.uint8).reshape(count, rows)
        for component in range(count):
            own = [packed[component, t % rows] >> (bits * (t // rows)) & (2**bits - 1) for t in range(num_tokens)]
            codes.append(np.array(own, dtype=np.int64) - (2 ** (bits - 1) - 1))
    return np.array(codes).reshape(len(widths), num_tokens).T


def part_of(tensors: dict[str, torch.Tensor], part: str) -> dict[str, Array]:
    """Return a part's tensors by name as NumPy arrays; NumPy has no bfloat16."""
    own = {name.removeprefix(f"{part}."): one for name, one in tensors.items() if name.startswith(part)}
    return {name: (one.float() if one.dtype == torch.bfloat16 else one).numpy() for name, one in own.items()}


def in_16_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers rounded to the upper half of their bits, to even, by arithmetic on the bits."""
    bits = numbers.float().numpy().view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.from_numpy((upper << 16).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("num_tokens", [3, 5, 61])
def test_what_is_decoded_is_mean_and_codes_times_components(codec: KvtcCodec, basis: KVBlock, num_tokens: int) -> None:
    block = passage(99, num_tokens)
    tensors = codec.encode(block)
    decoded = codec.decode(tensors)
    for part, rows in (("keys", basis.keys), ("values", basis.values)):
        own = part_of(tensors, part)
        coded = [token for token in range(num_tokens) if token not in own["exact"]]
        expected = in_16_bits(getattr(block, part)).numpy()
        for number, (layers, group) in enumerate(groups_by_hand(rows.numpy())):
            codes = codes_by_hand(own, number, group["widths"], len(coded))
            restored = (codes @ group["components"] + group["mean"]).reshape(len(coded), len(layers), HEADS, WIDTH)
            expected[np.ix_(layers, range(HEADS), coded)] = restored.transpose(1, 2, 0, 3)
        assert np.array_equal(getattr(decoded, part).numpy(), expected)
    assert len(codec.bases.get(basis_name(basis), Basis).groups(0, "keys", (LAYERS, HEADS, 0, WIDTH)) or ()) == 2


def test_codes_are_the_nearest_and_a_token_that_they_miss_is_exact(codec: KvtcCodec, basis: KVBlock) -> None:
    """Codes are nearest by least squares in scales. Token 40 is unlike all passages in a layer's keys; tokens 60 and 61
    differ from the mean by slightly more and slightly less than the limit, in a direction without components.
    """
    block = passage(99)
    (_, _), (layers, group) = groups_by_hand(basis.keys.numpy())
    directions, off = group["components"] / group["scale"], np.random.default_rng(0).standard_normal(2 * HEADS * WIDTH)
    off -= directions.T @ np.linalg.lstsq(directions.T, off, rcond=None)[0]
    for token, share in ((60, 1.1), (61, 0.9)):
        numbers = group["mean"] + group["scale"] * off * np.sqrt(share * group["limit"] / (off @ off))
        block.keys[layers, :, token] = torch.from_numpy(numbers.reshape(len(layers), HEADS, WIDTH)).float()
    block.keys[1, 0, 40] += torch.linspace(-40, 40, WIDTH)
    tensors = codec.encode(block)
    assert {40, 60} <= set(tensors["keys.exact"].tolist())
    assert 61 not in tensors["keys.exact"].tolist()
    assert 40 not in tensors["values.exact"].tolist()
    for part, rows in (("keys", basis.keys), ("values", basis.values)):
        own, given = part_of(tensors, part), getattr(block, part).double().numpy()
        beyond = {0}
        coded = [token for token in range(200) if token not in own["exact"]]
        for number, (layers, group) in enumerate(groups_by_hand(rows.numpy())):
            scaled = given[layers].transpose(2, 0, 1, 3).reshape(200, -1)
            scaled = (scaled - group["mean"]) / group["scale"]
            directions = group["components"] / group["scale"]
            found = np.linalg.lstsq(directions.T, scaled.T, rcond=None)[0].T
            most = 2.0 ** (group["widths"] - 1) - 1
            codes = codes_by_hand(own, number, group["widths"], len(coded))
            assert (np.abs(codes - found.clip(-most, most)[coded]) <= 0.5 + 1e-3).all()
            errors = ((found.round().clip(-most, most) @ directions - scaled) ** 2).sum(1)
            beyond |= set(np.nonzero(errors > group["limit"])[0].tolist())
        assert set(own["exact"].tolist()) == beyond
        kept = tensors[f"{part}.numbers"]
        assert kept.dtype == torch.bfloat16
        assert torch.equal(kept.float(), in_16_bits(getattr(block, part))[:, :, sorted(beyond)])


def test_bytes_are_those_asked_for_and_errors_small(codec: KvtcCodec) -> None:
    """With ten hidden directions in 48 numbers per token, an eighth of bfloat16's bytes restores the numbers."""
    block = passage(97, 400, torch.bfloat16)
    tensors = codec.encode(block)
    exact = sum(tensors[f"{part}.numbers"].nbytes for part in ("keys", "values"))
    coded = sum(tensor.nbytes for tensor in tensors.values()) - exact
    assert 0.8 <= coded / ((block.num_bytes - exact) / RATIO) <= 1.15
    decoded = codec.decode(tensors)
    for exact_numbers, restored in ((block.keys, decoded.keys), (block.values, decoded.values)):
        for wanted, found in zip(exact_numbers.double(), restored.double(), strict=True):
            deviation = (wanted - wanted.mean(1, keepdim=True)).square().mean().sqrt()
            assert (found - wanted).square().mean().sqrt() <= 0.15 * deviation


def test_principal_components_span_what_numpys_do(basis: KVBlock) -> None:
    """All layers are a single group with more bits than needed: the first ten components equal those of a singular
    value decomposition of the sample's first three quarters.
    """
    blocks = [passage(seed) for seed in range(12)]
    rows = fit_basis(blocks, 2.0).keys
    ((_, group),) = groups_by_hand(rows.numpy())
    sample = np.concatenate([block.keys.double().numpy()[:, :, 1:] for block in blocks], axis=2)
    sample = sample.transpose(2, 0, 1, 3).reshape(sample.shape[2], -1)[: sample.shape[2] * 3 // 4]
    _, _, expected = np.linalg.svd((sample - sample.mean(0)) / group["scale"], full_matrices=False)
    own = group["components"][:10] / group["scale"]
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    assert np.allclose(np.abs((own * expected[:10]).sum(1)), 1, atol=1e-4)
    assert np.allclose(group["mean"], sample.mean(0), atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bits_are_allotted_as_brute_force_does(data: st.DataObject) -> None:
    """All rates are whole numbers of states, so that nothing is rounded."""
    count = data.draw(st.integers(1, 5))
    prices = st.lists(st.integers(0, 2000), min_size=3, max_size=3)
    rates = np.array([[0, *sorted(data.draw(prices))] for _ in range(count)])
    errors = np.array([data.draw(st.lists(st.floats(0, 100), min_size=4, max_size=4)) for _ in range(count)])
    found = allot(rates.astype(float), errors, float(STATES))
    spent = sum(rates[rank, choice] for rank, choice in enumerate(found))
    assert spent <= STATES
    least = min(
        sum(errors[rank, choice] for rank, choice in enumerate(chosen))
        for chosen in product(range(4), repeat=count)
        if sum(rates[rank, choice] for rank, choice in enumerate(chosen)) <= STATES
    )
    assert sum(errors[rank, choice] for rank, choice in enumerate(found)) == pytest.approx(least)


def test_many_components_share_choices_with_their_neighbours() -> None:
    rates = np.tile([0.0, 1.0], (1000, 1))
    errors = np.stack([np.linspace(1000, 0, 1000), np.zeros(1000)], 1)
    found = allot(rates, errors, 500.0)
    assert 490 <= found.sum() <= 500
    assert found[:480].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("first", "last"), [(0, 0), (4, 0), (2, 3), (300, 1)])
def test_first_and_last_tokens_are_exact(basis: KVBlock, first: int, last: int, dtype: torch.dtype) -> None:
    """They are equal bit for bit if the block has 16-bit numbers, and rounded to bfloat16 otherwise."""
    bases = Bases()
    bases.add(basis)
    codec, block = KvtcCodec(bases, first_tokens=first, last_tokens=last), passage(96, 50, dtype)
    tensors = codec.encode(block)
    kept = {token for token in range(50) if token < first or token >= 50 - last}
    assert kept <= set(tensors["keys.exact"].tolist())
    assert first + last > 0 or not tensors["keys.exact"].numel()
    decoded = codec.decode(tensors)
    for token in kept:
        for wanted, found in ((block.keys, decoded.keys), (block.values, decoded.values)):
            expected = in_16_bits(wanted) if dtype == torch.float32 else wanted
            assert torch.equal(found[:, :, token], expected[:, :, token])
    off = max(float((one - other).abs().max()) for one, other in zip(pair(block), pair(decoded), strict=True))
    assert off <= codec.error_bound(block)


def pair(block: KVBlock) -> tuple[torch.Tensor, torch.Tensor]:
    return block.keys.double(), block.values.double()


def test_a_block_is_decoded_with_its_own_basis_alone(codec: KvtcCodec, basis: KVBlock, tmp_path: Path) -> None:
    """The block names its basis, so another basis of the same shape is never used for it."""
    other = fit_basis([passage(seed) for seed in range(20, 32)], RATIO, FEATURES)
    assert basis_name(other) != basis_name(basis)
    block, key = passage(95), make_key(1)
    written = write_block(tmp_path / "block", key, block, codec)
    foreign = Bases()
    foreign.add(other)
    with pytest.raises(DamagedBlockError, match=f"basis {basis_name(basis)} is gone"):
        read_block(tmp_path / "block", key, foreign)
    codec.bases.add(other)
    assert same(read_block(tmp_path / "block", key, codec.bases), written), "new blocks alone use the new one"
    foreign = Bases({basis_name(basis): other.map(lambda rows: rows[:1])}.get)
    with pytest.raises(DamagedBlockError, match="was made from other layers"):
        read_block(tmp_path / "block", key, foreign)
    foreign = Bases({basis_name(basis): passage(1)}.get)
    with pytest.raises(DamagedBlockError):
        read_block(tmp_path / "block", key, foreign)


def test_a_stream_that_was_written_wrong_is_damage(codec: KvtcCodec) -> None:
    """Frames of a wrong length are found when the block is checked, and flipped bits when it is decoded."""
    tensors = codec.encode(passage(98, 37))
    stream, ends = tensors["keys.stream"], tensors["keys.ends"]
    other = torch.frombuffer(bytearray(zstandard.ZstdCompressor().compress(b"other")), dtype=torch.uint8)
    wrong = [
        {"keys.stream": stream[:-1]},
        {"keys.stream": torch.zeros_like(stream)},
        {"keys.stream": torch.cat([other, stream]), "keys.ends": ends + other.numel()},
        {"keys.ends": ends.flip(0)},
        {"keys.ends": ends - ends[-1]},
    ]
    for change in wrong:
        with pytest.raises(DamagedBlockError):
            codec.decode({**tensors, **change})
    refused = 0
    for position in range(int(ends[0])):
        flipped = stream.clone()
        flipped[position] ^= 16
        try:
            codec.decode({**tensors, "keys.stream": flipped}).layer_keys(0)
        except DamagedBlockError:
            refused += 1
    assert refused > 0, "and nothing else is raised, whichever bit it is"


def test_blocks_of_another_shape_or_without_a_basis_are_refused(codec: KvtcCodec) -> None:
    block = passage(94)
    with pytest.raises(UnencodableBlockError, match="no basis yet"):
        KvtcCodec().encode(block)
    with pytest.raises(UnencodableBlockError, match="made from other layers"):
        codec.encode(block.map(lambda numbers: numbers[:2]))


def test_too_few_tokens_are_refused_with_the_way_out() -> None:
    """Two tokens are needed for each of 32 features; the first token of each passage does not count."""
    short = [passage(seed, 9) for seed in range(8)]
    fit_basis(short, RATIO, FEATURES)
    with pytest.raises(BasisError, match=r"needs 64 tokens, and there are 56 .*ingest more passages at once"):
        fit_basis(short[1:], RATIO, FEATURES)
    with pytest.raises(BasisError, match=r"needs 32 tokens, and there are 28 that each head keeps \(KVzip\)"):
        fit_basis([make_sparse(passage(seed, 14), 8) for seed in range(4)], RATIO, FEATURES)
    with pytest.raises(BasisError):
        fit_basis([])
    with pytest.raises(ConfigError, match=r"ratio is 0\.5"):
        fit_basis(short, 0.5)


def test_layers_that_differ_have_a_basis_by_part() -> None:
    blocks = []
    for seed in range(6):
        one = passage(seed)
        blocks.append(MixedBlock([one.map(lambda n: n[:2]), one.map(lambda n: n[2:, :1])], (0, 1, 0)))
    bases = Bases()
    bases.add(fit_basis(blocks, RATIO))
    codec = KvtcCodec(bases)
    decoded = codec.decode(codec.encode(blocks[0]))
    for layer in range(3):
        off = (decoded.layer_keys(layer) - blocks[0].layer_keys(layer)).square().mean()
        assert off <= 0.03 * blocks[0].layer_keys(layer).var()


@pytest.mark.parametrize("num_tokens", [100, 200, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_expected_bytes_are_nearly_those_of_an_unseen_passage(dtype: torch.dtype, num_tokens: int) -> None:
    bases = Bases()
    bases.add(fit_basis([passage(seed) for seed in range(12)]))
    codec, block = KvtcCodec(bases), passage(77, num_tokens, dtype)
    found = sum(tensor.nbytes for tensor in codec.encode(block).values())
    assert codec.expected_bytes(block.layers, num_tokens, dtype.itemsize) == pytest.approx(found, rel=0.1)


def test_what_each_head_holds_of_its_own_has_twice_the_bytes() -> None:
    """Heads that hold different tokens are hardly correlated."""
    generator = torch.Generator().manual_seed(3)

    def kept(seed: int) -> KVBlock:
        order = torch.rand(LAYERS, HEADS, 960, generator=generator).argsort(2)
        return keep(passage(seed, 960), list(order < 240))

    bases, blocks = Bases(), [kept(seed) for seed in range(12)]
    bases.add(fit_basis(blocks))
    codec, block = KvtcCodec(bases), kept(77)
    tensors = codec.encode(block)
    assert [tensors[f"{layer}.keys.exact"].tolist() for layer in range(LAYERS)] == [[0]] * LAYERS
    streams = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("stream"))
    coded = 2 * 2 * LAYERS * HEADS * 239 * WIDTH
    assert streams == pytest.approx(coded / 10, rel=0.2)
    expected = codec.expected_bytes(passage(0).layers, 960, 4, 0.25)
    assert expected == pytest.approx(sum(tensor.nbytes for tensor in tensors.values()), rel=0.1)


def test_numbers_that_never_change_are_restored() -> None:
    still = KVBlock(torch.full((2, 1, 400, 4), 0.1), torch.zeros(2, 1, 400, 4))
    bases = Bases()
    bases.add(fit_basis([still]))
    codec = KvtcCodec(bases)
    decoded = codec.decode(codec.encode(still))
    assert torch.allclose(decoded.keys[:, :, 1:], still.keys[:, :, 1:], atol=1e-6)
    assert torch.equal(decoded.keys[:, :, :1], in_16_bits(still.keys)[:, :, :1])
    assert torch.equal(decoded.values, still.values)


def test_unpacked_codes_keep_their_budget_and_their_blocks() -> None:
    recent, made = Recent(80), list[int]()

    def codes(number: int) -> torch.Tensor:
        made.append(number)
        return torch.full((40,), number, dtype=torch.int8)

    streams = [torch.zeros(1) for _ in range(3)]
    for number in (0, 1, 0, 2, 0, 1):
        assert int(recent.get(streams[number], 0, lambda number=number: codes(number))[0]) == number  # type: ignore[misc]
    assert made == [0, 1, 2, 1], "two have room; the one that was used longest ago goes"
    assert recent._num_bytes == 80
    recent.get(torch.zeros(1), 0, lambda: torch.zeros(200, dtype=torch.int8))
    assert recent._num_bytes == 0, "what is larger than all room is not kept"


def test_a_store_keeps_its_basis_pinned_and_reads_by_it(basis: KVBlock, tmp_path: Path) -> None:
    block, key = passage(93), make_key(1)
    with KVStore(tmp_path, codec="kvtc", disk_bytes=1 << 20) as store:
        assert store.lacks_basis
        assert store.codec.name == "raw"
        assert same(store.put(make_key(2), block), block)
        name = store.add_basis(basis)
        assert not store.lacks_basis
        assert name in store.pinned
        kept = store.put(key, block)
    with KVStore(tmp_path, codec="raw") as store:
        found = store.get(key)
        assert found is not None
        assert same(found.block, kept)
        assert not same(found.block, block)
        raw = store.get(make_key(2))
        assert raw is not None
        assert same(raw.block, block)
        store.verify(key)
    with KVStore(tmp_path, codec="kvtc", basis=name) as store:
        assert same(store.put(make_key(3), block), kept)
        store.delete(name)
    with KVStore(tmp_path, codec="kvtc", basis=name) as store:
        assert store.get(key) is None, "a block without its basis is damaged: dropped, to be computed again"
        assert tier_of(store, key) is None


def test_a_basis_that_no_tier_has_room_for_is_refused(basis: KVBlock, tmp_path: Path) -> None:
    with KVStore(tmp_path, codec="kvtc", disk_bytes=2000) as store:
        with pytest.raises(BasisError, match=r"no room for a basis of .* bytes"):
            store.add_basis(basis)
        assert store.lacks_basis
    with KVStore(tmp_path, codec="kvtc", memory_bytes=2000) as store:
        with pytest.raises(PinError):
            store.add_basis(basis)
        assert store.lacks_basis
