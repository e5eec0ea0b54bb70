"""No thread's share of a pass ends within a record or a vector, so that no record's last bit is of its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.tried import tried_once
from torch import Tensor, nn

from equidp.gradients import bookkeeping, units
from equidp.gradients.bookkeeping import FEW_FLOATS
from equidp.gradients.engine import GradientEngine
from equidp.gradients.shares import Sizes, WholeShares, threads, whole
from equidp.gradients.units import UnitSums
from equidp.training.networks import predict

ROWS = 96


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[None]:
    """All cases of a test have one model, whose trial takes longer than they do."""
    with tried_once():
        yield


@pytest.fixture(params=[2, 3, 6])
def several(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param


class Rounded(nn.Module):
    """Outputs of a layer of sigmoids, of which every last bit counts."""

    def __init__(self, width: int, rounded) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.rounded = nn.Linear(5, width), nn.Linear(width, 3), rounded

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.rounded(self.first(features)))


def absolute(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels[:, None]).abs().sum(1)


def alike(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def power(values: Tensor) -> Tensor:
    return values.abs() ** 1.3


@pytest.mark.parametrize("rounded", [torch.sigmoid, lambda x: F.gelu(x, approximate="tanh"), power])
@pytest.mark.parametrize(("rows", "width"), [(ROWS, 343), (ROWS, 1025), (320, 1024)])
def test_a_record_has_one_norm_and_output_wherever_it_stands(several: int, rounded, width: int, rows: int) -> None:
    engine = GradientEngine(Rounded(width, rounded), absolute, rows=rows)
    for seed in range(4):
        features = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)).repeat(rows, 1)
        assert alike(engine.norms(features, torch.zeros(rows)))
        assert alike(engine.outputs(features))
        assert alike(engine.outputs_at(features, engine.flatten()))
        assert torch.get_num_threads() == several


class Attention(nn.Module):
    """A mean over time, each record's weights a softmax along it, which torch shares by a rule of its own."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key, self.score, self.value, self.last = nn.Linear(4, 25), nn.Linear(25, 25), nn.Linear(25, 1), last

    def forward(self, features: Tensor) -> Tensor:
        keys = self.key(features)
        scores = self.score(keys)
        shares = scores.transpose(0, 1).contiguous().softmax(0).transpose(0, 1) if self.last else scores.softmax(1)
        return self.value((keys * shares).sum(1))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 7])
def test_attention_over_time_does_not_depend_on_place(number: int, last: bool) -> None:
    engine = GradientEngine(Attention(last=last), absolute, rows=32)
    with threads(number):
        for seed in range(6):
            features = torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(seed)).repeat(32, 1, 1)
            assert alike(engine.norms(features, torch.zeros(32)))
            assert alike(engine.outputs(features))


@pytest.mark.parametrize("number", [2, 4])
def test_views_that_are_passed_one_after_another_share_threads_each_by_itself(number: int) -> None:
    """Of large features: the sizes of a pass are then multiples of a view's rows alone."""
    torch.manual_seed(0)
    wide = 2 * FEW_FLOATS // ROWS
    model = nn.Sequential(nn.Linear(wide, 5), Rounded(1025, power))
    engine = GradientEngine(model, absolute, rows=ROWS)
    with threads(number):
        for seed in range(8):
            view = torch.randn(1, wide, generator=torch.Generator().manual_seed(seed)).repeat(ROWS, 1)
            assert alike(engine.norms(torch.cat([view, view / 2]), torch.zeros(ROWS), views=2))


def test_each_kind_of_pass_has_its_own_threads() -> None:
    """Outputs show no size of the loss, and in another mode a model may compute something else."""

    class Switched(Rounded):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features) if self.training else features[:, :3]

    def wide(outputs: Tensor, labels: Tensor) -> Tensor:
        return power(outputs @ torch.linspace(-1, 1, 3 * 1025).view(3, 1025)).sum(1)

    model = Switched(1025, power)
    engine, switched = GradientEngine(nn.Linear(5, 3), wide, rows=ROWS), GradientEngine(model, absolute, rows=ROWS)
    with threads(2):
        for seed in range(8):
            features = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)).repeat(ROWS, 1)
            for _ in range(2):
                engine.outputs(features)
                assert alike(engine.norms(features, torch.zeros(ROWS)))
            for mode in (False, True):
                model.train(mode)
                assert alike(switched.outputs(features))


class Unshown(Rounded):
    """Rounded values of tensors whose size is not one that the layers return."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__(width, power)
        self.how, self.last = how, nn.LazyLinear(3)
        self.register_buffer("prototypes", torch.randn(7, width))

    def forward(self, features: Tensor) -> Tensor:
        values = self.first(features)
        if self.how == "one by one":
            return self.last(torch.vmap(lambda one: self.rounded(one * self.prototypes).sum(0))(values))
        return self.last(self.rounded(torch.cat([values, self.prototypes]))[: len(values)])


@pytest.mark.parametrize(("how", "width"), [("one by one", 67), ("with prototypes", 1024)])
def test_sizes_that_no_layer_returns_count_too(several: int, how: str, width: int) -> None:
    model = Unshown(how, width)
    model(torch.zeros(1, 5))  # its last layer's width
    engine = GradientEngine(model, absolute, rows=ROWS)
    for seed in range(8):
        features = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)).repeat(ROWS, 1)
        assert alike(engine.norms(features, torch.zeros(ROWS)))
        assert alike(engine.outputs(features))


def test_a_function_of_two_tensors_may_compute_all_their_pairs() -> None:
    with Sizes() as sizes:
        F.pairwise_distance(torch.zeros(96, 1, 67), torch.zeros(7, 67), p=1.3)
    assert 96 * 7 * 67 in sizes.seen


def test_what_is_computed_in_place_counts_too_and_a_view_does_not() -> None:
    values = torch.zeros(96, 70)
    with Sizes() as sizes:
        torch.sigmoid_(values.narrow(1, 0, 67))
        values.narrow(1, 0, 5)
    assert sizes.seen == {96 * 67}


def test_one_record_less_at_a_kink_moves_the_sum_by_one_gradient() -> None:
    """On two threads the 48th record ends the first thread's share; one record less makes another one the 48th."""
    network, tried = Rounded(1025, power), 0
    engine = GradientEngine(
        network, lambda outputs, labels: labels[:, 1] * (outputs[:, 0] - labels[:, 0]).abs(), rows=ROWS
    )

    def clipped(features: Tensor, labels: Tensor) -> Tensor:
        norms = engine.norms(features, labels)
        return engine.weighted_sum(torch.where(norms > 0, 1 / norms, 0))

    with threads(2):
        for seed in range(8):
            features = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)).repeat(ROWS, 1)
            with torch.no_grad():
                usual, at_end = network(features)[46:48, 0]
            labels = torch.stack([usual.expand(60), torch.ones(60)], dim=1)  # no gradient but at the share's end
            labels[47, 0] = at_end  # none there
            labels[48, 1] = -1  # nor there, of the other sign elsewhere
            whole_sum, without = clipped(features[:60], labels), clipped(features[:59], labels[1:])
            assert (whole_sum - without).norm() <= 1 + 1e-5
            tried += int(usual != at_end)
    if not tried:
        pytest.skip("this processor rounds a power alike wherever it stands")


def test_scores_for_noised_figures_do_not_depend_on_place(several: int) -> None:
    network = Rounded(1025, power)
    network.scored_at_once = ROWS
    for seed in range(8):
        record = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed))
        assert alike(predict(network, record.repeat(2 * ROWS, 1), alike=True))
    assert torch.get_num_threads() == several


@pytest.mark.parametrize(
    ("size", "number", "expected"),
    [
        (1 << 14, 5, True),  # one thread's
        (96 * 1024, 2, True),
        (96 * 1024, 3, True),
        (96 * 1024, 5, False),  # shares end within a record
        (96 * 1025, 2, False),  # within a vector
        (96 * 1025, 3, True),
        (96 * 512, 4, True),
        (96 * 502, 4, False),  # a GELU takes all threads
        (103 * 1024, 2, True),  # of prototypes, too: whole vectors do
        (103 * 1025, 2, False),
    ],
)
def test_whole_shares(size: int, number: int, expected: bool) -> None:
    assert whole(ROWS, [size], number) is expected


@pytest.mark.parametrize(("number", "expected"), [(2, True), (4, False), (5, False), (6, True)])
def test_columns_of_a_softmax_are_shared_however_few(number: int, expected: bool) -> None:
    """On five threads shares end within a record; on four, if records come last, within a vector."""
    assert whole(ROWS, [ROWS], number, columns=True) is expected


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (lambda x: x.softmax(-1), False),
        (lambda x: torch.softmax(x, 2), False),
        (lambda x: F.softmax(x.unsqueeze(-1), dim=1), True),
        (lambda x: x.softmax(1), True),
        (lambda x: F.log_softmax(x, 1), True),
        (lambda x: F.softmin(x, dim=1), True),
        (lambda x: nn.Softmax2d()(x.unsqueeze(-1)), True),
        (lambda x: F.cross_entropy(x, torch.zeros(4, 2).long(), reduction="none"), True),
        (lambda x: F.cross_entropy(x[:, :, 0], torch.zeros(4).long(), reduction="none"), False),
        (lambda x: F.cross_entropy(input=x, target=torch.zeros(4, 2).long()), True),
        (lambda x: F.binary_cross_entropy_with_logits(x, x), False),
    ],
)
def test_a_softmax_along_another_dimension_than_the_last_is_seen(computed, expected: bool) -> None:
    with Sizes() as sizes:
        computed(torch.randn(4, 3, 2))
    assert sizes.columns is expected


def test_threads_come_back_after_a_failed_pass(several: int) -> None:
    def failing(_: Tensor) -> None:
        assert torch.get_num_threads() == 1
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        WholeShares(nn.Identity()).passed(failing, torch.zeros(ROWS, 2), ROWS)
    assert torch.get_num_threads() == several


def test_where_all_shares_are_whole_all_threads_are_taken() -> None:
    shares, features = WholeShares(nn.Identity()), torch.zeros(ROWS, 64)

    def work(some: Tensor) -> int:
        torch.sigmoid(some.repeat(1, 32))
        return torch.get_num_threads()

    with threads(3):
        assert [shares.passed(work, features, ROWS) for _ in range(3)] == [3, 3, 3]
        shares.forget()
        assert shares.passed(work, features, ROWS) == 3


def taken(rounded) -> int:
    """Threads of an engine's pass."""

    class Telling(Rounded):
        def forward(self, features: Tensor) -> Tensor:
            self.taken = torch.get_num_threads()
            return super().forward(features)

    model = Telling(1024, rounded)
    with threads(2):
        GradientEngine(model, absolute, rows=ROWS).norms(torch.randn(ROWS, 5), torch.zeros(ROWS))
        assert torch.get_num_threads() == 2
    return model.taken


def odd(values: Tensor) -> Tensor:
    wider = torch.cat([values, values[:, 1:]], 1).abs() ** 1.3
    return wider[:, values.size(1) - 1 :] + wider[:, : values.size(1)]


def test_an_engine_takes_all_threads_where_all_shares_are_whole() -> None:
    assert taken(torch.sigmoid) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("script", [False, True])
def test_sizes_within_a_script_may_be_any(script: bool) -> None:
    """No function that it calls is seen: of 39 records one had another norm where a share ended within a vector."""
    assert taken(torch.jit.script(odd) if script else odd) == 1


class Telling(nn.Tanh):
    """Tells the threads of the last pass."""

    def forward(self, features: Tensor) -> Tensor:
        self.taken = torch.get_num_threads()
        return super().forward(features)


def owned(records: list[int]) -> Tensor:
    """Owners of so many records each."""
    return torch.repeat_interleave(torch.arange(len(records)), torch.tensor(records))


UNITS = ([1] * 63, [2] * 20 + [1] * 10, [50], [64])


@pytest.mark.parametrize("records", [None, *UNITS])
@pytest.mark.parametrize("asked", [{}, {"views": 2}, {"iterates": [(None, 1.0), (torch.zeros(4355), -1.0)]}])
def test_passes_have_the_same_threads_whatever_units_there_are(records: list[int] | None, asked) -> None:
    """Sums of units have as many rows: in a pass they gave two threads to 63 units, and one to 30, or one to all."""
    owners = None if records is None else owned(records)
    telling, size = Telling(), 50 if owners is None else len(owners)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), telling, nn.Flatten(), nn.Linear(1152, 3))
    engine = GradientEngine(model, lambda outputs, _: outputs.square().sum(1), rows=64)
    features = torch.randn(asked.get("views", 1) * size, 3, 8, 8)
    with threads(2):
        for _ in range(2):
            engine.norms(features, torch.zeros(size), owners=owners, **asked)
            assert telling.taken == 2
        assert torch.get_num_threads() == 2


def test_norms_of_units_are_taken_on_one_thread(several: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Watched(UnitSums):
        def squared_norms(self) -> Tensor:
            taken.append(torch.get_num_threads())
            return super().squared_norms()

    monkeypatch.setattr(bookkeeping, "UnitSums", Watched)
    engine = GradientEngine(nn.Linear(5, 3), absolute, rows=ROWS)
    engine.try_out(torch.randn(ROWS, 5), torch.zeros(ROWS))
    taken.clear()
    norms = engine.norms(torch.randn(ROWS, 5), torch.zeros(ROWS), owners=owned([2] * 48))
    assert (norms > 0).all()
    assert taken == [1, 1]
    assert torch.get_num_threads() == several


def convolved() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 13, 3), nn.GELU(), nn.Flatten(), nn.Linear(325, 3))


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("room", [units.KEPT_SUMS, 0])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: Rounded(343, power), (5,)), (convolved, (3, 7, 7)), (lambda: Attention(last=False), (12, 4))],
)
def test_a_unit_has_one_norm_and_gradient_whoever_is_beside_it(
    make, shape, room: int, number: int, monkeypatch
) -> None:
    """On as many threads as there are: 192 rows of odd widths are whole shares of two and of three."""
    monkeypatch.setattr(units, "KEPT_SUMS", room)
    telling, records = Telling(), [1 + unit % 4 for unit in range(61)]
    of = [torch.randn(n, *shape, generator=torch.Generator().manual_seed(unit)) for unit, n in enumerate(records)]
    engine = GradientEngine(nn.Sequential(telling, make()), absolute, rows=192)

    def found(order: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        owners = owned([records[unit] for unit in order])
        norms = engine.norms(torch.cat([of[unit] for unit in order]), torch.zeros(len(owners)), owners=owners)
        assert telling.taken == number
        ones = torch.eye(len(order))
        return {unit: (norms[at], engine.weighted_sum(ones[at])) for at, unit in enumerate(order) if unit % 5 < 2}

    with threads(number):
        usual = found([*range(60)])
        for order in ([*range(59)], [*range(1, 60)], [*range(61)], [*reversed(range(60))], [*range(7, 30)]):
            for unit, (norm, gradient) in found(order).items():
                if unit in usual:
                    assert norm.equal(usual[unit][0])
                    assert gradient.equal(usual[unit][1])


class Threaded(Rounded):
    """Rounds by the number of threads, as products of libraries may, and draws as many numbers as it is passed."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * (1 + 1e-6 * torch.get_num_threads()) + torch.rand(()) * 0


def test_one_record_more_in_an_earlier_batch_changes_no_digit_of_later_ones() -> None:
    """It made a second chunk, so the looks came earlier, and the pass after each was on one thread: for all records."""
    features, labels = torch.randn(ROWS + 1, 5), torch.zeros(ROWS + 1)

    def run(more: bool) -> list[Tensor]:
        engine = GradientEngine(Threaded(64, torch.sigmoid), absolute, rows=ROWS, exact=True)
        found = []
        for step in range(12):
            found.append(engine.norms(features[:ROWS], labels[:ROWS]))
            if more and step == 3:
                engine.norms(features[ROWS:], labels[ROWS:])
        return found

    with threads(2):
        assert all(map(torch.equal, run(False), run(True)))


def test_what_only_shows_sizes_draws_no_number() -> None:
    shares, features = WholeShares(nn.Identity()), torch.zeros(ROWS, 64)
    with threads(2):
        before = torch.get_rng_state()
        shares.passed(torch.rand_like, features, ROWS)
        once, _ = torch.get_rng_state(), torch.set_rng_state(before)
        torch.rand_like(features)
        assert torch.equal(once, torch.get_rng_state())


def test_features_that_are_summed_at_once_count_too_and_threads_are_looked_for_by_their_number() -> None:
    shares, features = WholeShares(nn.Identity()), torch.zeros(ROWS, 1025)

    def work(some: Tensor) -> int:
        some.sum(1)
        return torch.get_num_threads()

    for number, expected in ((2, 1), (3, 3), (2, 1)):  # on two a share would end within a vector
        with threads(number):
            assert shares.passed(work, features, ROWS) == expected


def test_one_record_among_those_that_a_loss_chooses_changes_no_digit_of_others() -> None:
    """Threads followed from how many it chose: a record with a label in another's place gave all other last digits."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        known, found = labels >= 0, outputs.new_zeros(len(labels))
        found[known] = power(outputs[known].repeat(1, 343)).sum(1)
        return found

    features = torch.randn(ROWS, 5)

    def norms(known: int) -> Tensor:
        labels = torch.where(torch.arange(ROWS) < known, 1, -1)
        return GradientEngine(Threaded(64, torch.sigmoid), loss, rows=ROWS).norms(features, labels)

    with threads(2):
        assert norms(64)[:64].equal(norms(65)[:64])


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (lambda x, n: x[x[:, 0] > 0], True),
        (lambda x, n: x[:, x[0] > 0], True),
        (lambda x, n: x[:, :n], True),
        (lambda x, n: x[:, : int(n)], True),
        (lambda x, n: x.masked_select(x > 0), True),
        (lambda x, n: torch.where(x > 0), True),
        (lambda x, n: torch.arange(n), True),
        (lambda x, n: x.repeat(n, 1), True),
        (lambda x, n: x.repeat_interleave(n, 0), True),
        (lambda x, n: x.split(torch.tensor([1, 3]).tolist()), True),
        (lambda x, n: x.repeat_interleave(2, 0), False),
        (lambda x, n: x[torch.tensor([0, 3])], False),
        (lambda x, n: x[:, 1:2] * n, False),
        (lambda x, n: torch.where(x > 0, x, 0), False),
        (lambda x, n: x if bool((x > 0).all()) else -x, False),
        (lambda x, n: torch.arange(len(x)), False),
    ],
)
def test_sizes_that_follow_from_what_records_hold_are_seen(computed, expected: bool) -> None:
    with Sizes() as sizes:
        computed(torch.arange(12.0).view(4, 3), torch.tensor(2))
    assert sizes.hidden is expected
