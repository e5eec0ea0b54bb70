"""Probe: a trial of the model on a run's first batch, which checks the per-record gradients against autograd.

Per-record gradients are computed layer by layer. Two mistakes would make them wrong without any sign: a parameter that
reaches the loss past its own layer (a weight that a function uses), and a layer in which records meet. So the trial
checks the following.

- **Two records.** The gradient of each record, and its norm, must be those of autograd. So must those of a unit of
  both records. A record's norm must not depend on the other record, nor on whether there is another.
- **Several draws.** If the model draws random numbers, records may meet by chance (mixup): several draws are tried.
- **More records.** Two records may happen not to show that records meet: texts that are sorted or cut by length, gaps
  that are filled by a mean, layers that take records in fours. So more records are tried beside others and in another
  order, also with every second record shortened or darkened.
- **Every trained parameter gets a gradient.** If the loss does not depend on a parameter, only noise would move it.
- **No forward pass changes a buffer or a parameter.** A buffer would leave with the model, exact and without noise.
- **Nothing of the first records is kept elsewhere**, because it would be in all later gradients.

The norm matters most: the clipping weight follows from it, and no sum of gradients shows that it is too small. Where a
gradient cancels, our norm may be larger than that of autograd by what `overstatement` allows (`rounding.py`).

A trial cannot find everything. A fault that only other records would show, or that chance shows seldom, stays unseen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.agreement import RECORDS, TOLERANCE, close, compare_norms, first_two, mixed, nearby
from equidp.gradients.blocks import Asking
from equidp.gradients.bookkeeping import NOTHING, BookKeeping
from equidp.gradients.drawn import Drawing, drawn_apart, drawn_norms, draws, reseed, seeded_norms
from equidp.gradients.layout import evaluating
from equidp.gradients.misfit import FAILURES, halved_by_itself
from equidp.gradients.precision import as_precise_as_norms, spoiling
from equidp.gradients.refusals import changed, refuse_batch_statistics, same
from equidp.gradients.remembered import remembered
from equidp.gradients.shares import scripted
from equidp.gradients.sites import held
from equidp.gradients.varied import varied

SEVERAL = 32
DRAWS = 20  # of a model that draws: two records meet in each with a chance of a half where they are shuffled


def probe(passes: BookKeeping, features: Tensor, labels: Tensor, *, others: bool) -> int:
    """Try the model on the first records of a batch.

    The model is tried at its parameters and at others nearby. If a last layer begins at zero, all gradients below it
    are zero, and records that meet there would not show.

    Random numbers that the model draws (dropout) come from a copy of the generators, so the run draws the same as
    without the trial.

    Args:
        passes: the forward and backward passes of the model.
        features: `[b, …]`.
        labels: `[b, …]`.
        others: whether a layer or the loss is neither torch's nor of this package (`of_others`). Only these may keep
            something from pass to pass.

    Returns:
        How many records were tried; 0 if their gradients are not finite, which shows nothing.

    Raises:
        EquidpError: it names a parameter whose gradients are wrong or missing, or a parameter or buffer that changes,
            or says that records mix or that norms are wrong.
    """
    features, labels = features[:SEVERAL], labels[:SEVERAL]
    two = first_two(features, labels)
    passes.blocks.trying = True
    try:
        return _probed(passes, features, labels, two, others=others)
    finally:
        passes.blocks.trying = False


def _probed(passes: BookKeeping, features: Tensor, labels: Tensor, two: list[int], *, others: bool) -> int:
    # with cuDNN's TF32 the gradients of a sound model could differ by more than is allowed here
    with drawn_apart(passes) as seed, as_precise_as_norms():
        refuse_batch_statistics(passes.batch_norms)  # before any pass, because each pass moves the running statistics
        before = _kept_now(passes)  # before the very first pass: a buffer that only this one sets never changes again
        set_back = remembered(passes.model, passes.loss) if others else None
        if passes.device.type == "cpu" and halved_by_itself(passes, features):
            raise spoiling("The model turns torch.autocast on in its own forward", "leave it out there")
        _compare_kept(passes, before)
        if set_back is not None:
            _compare_first(passes, features, labels, seed, set_back)
        if not _found_sound(passes, features[two], labels[two], seed):
            # the gradients of these two are not finite; those of other records may be
            finite = seeded_norms(passes, features, labels, seed).isfinite()
            if not finite.any():
                return 0
            two = first_two(features, labels, finite)
            if not _found_sound(passes, features[two], labels[two], seed):
                return 0
        with passes.parameters_at(nearby(passes)):
            if _found_sound(passes, features[two], labels[two], seed, near=True) and len(two) == RECORDS:
                _compare_several(passes, features, labels, seed)
    return len(features) if len(two) == RECORDS else 1


def _compare_first(
    passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, set_back: Callable[[], None]
) -> None:
    """Refuse a model or a loss that keeps something of the records in its first pass.

    For example, it may subtract the mean of the first batch ever after. All later passes do the same, so comparing them
    shows nothing. The same holds for something that only grows, such as the largest number seen so far, by which
    records are divided. So what the model and the loss remember is set back (`set_back`), and these are compared:

    - the norms of all records after a first pass with the first record alone, and after a first pass with records of
      zeros that have the batch's labels;
    - the norm of the first record, and of the last, after a pass with all records, and without such a pass.
    """
    found = []
    for some, theirs in ((features[:1], labels[:1]), (torch.zeros_like(features), labels)):
        set_back()
        with contextlib.suppress(*FAILURES):  # the model does not accept such records
            passes.norms(some.clone(), theirs.clone())
        found.append(seeded_norms(passes, features, labels, seed))
    after_one, after_nobody = found
    compare_norms(passes, after_one, after_nobody, share=0.01)
    for place in sorted({0, len(features) - 1}):  # at least one of the two is not the record with the largest number
        one, its = features[place : place + 1], labels[place : place + 1]
        with contextlib.suppress(*FAILURES):  # the model does not accept a record alone
            after_all = seeded_norms(passes, one, its, seed)
            set_back()
            compare_norms(passes, after_all, seeded_norms(passes, one, its, seed), share=0.01)
        seeded_norms(passes, features, labels, seed)


def look_again(passes: BookKeeping, features: Tensor, labels: Tensor, records: int, *, sized: bool) -> None:
    """Compare records of a whole batch once more, later in the run.

    A model or a loss of others may come to do something that it did not do in the trial. It may add a penalty over the
    batch whose weight began at 0, choose among more records than were tried, or write into its buffers past autograd
    (`.data`). Three passes compare the norms of each half of the batch beside the other half and beside a copy of
    itself. A penalty may also be divided by the number of records, or differ with their places. So some records are
    compared with themselves in another order, and where passes differ in size, with half of them alone.

    Args:
        passes: the forward and backward passes of the model.
        features: `[records, …]`, or `[m·records, …]` for m views (augmented copies) of each record, one view after the
            other.
        labels: as long as the features.
        records: the number of records. Halves are taken within each view, because the views of one record are alike.
        sized: whether the number of rows in a private pass follows from the records.

    Raises:
        EquidpError: as `probe`.
    """
    with drawn_apart(passes) as seed, as_precise_as_norms():
        before, apart = _kept_now(passes), max(records // 2, 1)
        _compare_beside(passes, features, labels, seed, apart=apart)
        if passes.blocks:
            _ask_nothing(passes, features, labels, seed)
        some = min(records, SEVERAL)
        theirs = features[:some], labels[:some]
        _compare_again(passes, *theirs, seed, *drawn_norms(passes, *theirs, seed), some // 2 if sized else some)
        _compare_kept(passes, before)


def _compare_again(
    passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, norms: Tensor, drawn: bool, first: int
) -> None:
    """Refuse a model in which the norms of the `first` records change if they come alone, in the opposite order."""
    with _undrawn(passes, features, labels, seed, norms, drawn=drawn) as together:
        if together is not None and first:
            some, theirs = features[:first].flip(0), labels[:first].flip(0)
            compare_norms(passes, together[:first], seeded_norms(passes, some, theirs, seed).flip(0))


def _found_sound(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, *, near: bool = False) -> bool:
    """Try two records, or one; return False if their gradients are not finite, so that nothing was tried.

    `near`: whether the parameters are those nearby, and several draws were tried at them.
    """
    before = _kept_now(passes)
    norms, drawn = drawn_norms(passes, features, labels, seed)
    _compare_kept(passes, before)
    if passes.blocks:
        _try_blocks(passes, features, labels, seed)
        norms, drawn = drawn_norms(passes, features, labels, seed)
    unreached = set(passes.without_gradient())
    ours = passes.weighted_sum(torch.ones_like(norms))
    expected = _by_autograd(passes, features, labels, seed)
    if unreached and drawn:  # the model may leave out a layer by chance
        for draw in range(1, DRAWS):
            seeded_norms(passes, features, labels, seed + draw)
            unreached &= set(passes.without_gradient())
    _refuse_unreached(passes, [p for p in passes.parameters if p in unreached], expected)
    if not (norms.isfinite().all() and expected.isfinite().all()):
        return False
    _compare_sums(passes, features, ours, expected, norms)
    if len(features) == RECORDS:
        _compare_beside(passes, features, labels, seed, norms)
        if drawn and not near:
            _compare_draws(passes, features, labels, seed)
        with _undrawn(passes, features, labels, seed, norms, drawn=drawn) as together:
            if together is not None:
                alone = [seeded_norms(passes, features[i : i + 1], labels[i : i + 1], seed) for i in range(RECORDS)]
                compare_norms(passes, together, torch.cat(alone))
    # a model that remembers records, however slowly, has seen others by now, or the same ones again
    compare_norms(passes, norms, seeded_norms(passes, features, labels, seed), share=0.01)
    if len(features) == RECORDS:
        twice, owners = torch.tensor([[0, 1, 0], [0, 1, 1]], device=features.device)
        _compare_each(passes, features, labels, seed)
        _compare_each(passes, features[twice], labels[twice], seed, owners)
    return True


def _try_blocks(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> None:
    """Check a layer that sees several rows of each record: does a record alone have as many, and in the same order?

    The record alone is compared with the record beside one of zeros. Beside a copy of itself, rows in another order
    would not show.
    """
    if scripted(passes.model, passes.loss):
        raise EquidpError(
            f"Layer {passes.blocks.first!r} sees several rows of each record along the first dimension, and the model "
            "or its loss calls TorchScript, which does not show whether records' numbers say how many: leave torch.jit "
            "out."
        )
    one, two = features[:1], torch.cat([features[:1], torch.zeros_like(features[:1])])
    seeded_norms(passes, one, labels[:1], seed)
    _ask_nothing(passes, features, labels, seed)
    with contextlib.suppress(*FAILURES):
        norms, drawn = drawn_norms(passes, two, labels[[0, 0]], seed)
        with _undrawn(passes, two, labels[[0, 0]], seed, norms, drawn=drawn) as together:
            if together is not None and not close(passes, together[:1], seeded_norms(passes, one, labels[:1], seed)):
                raise EquidpError(
                    f"Layer {passes.blocks.first!r} sees several rows of each record along the first dimension, and "
                    "not one record's after another's: let it, as x.flatten(0, 1) of [b, windows, …] does; else "
                    "records must stay along the first dimension (batch_first=True, say)."
                )


def _ask_nothing(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> None:
    """Refuse a layer of several rows a record if torch was asked before for a size that numbers in records decide."""
    with Asking() as passes.blocks.asking:
        try:
            seeded_norms(passes, features, labels, seed)
        finally:
            passes.blocks.asking = None


def _compare_several(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> None:
    _compare_beside(passes, features, labels, seed, apart=len(features) // 2)
    some = varied(passes, features, labels)
    norms, drawn = drawn_norms(passes, some, labels, seed)
    _compare_beside(passes, some, labels, seed, norms)
    _compare_again(passes, some, labels, seed, norms, drawn, len(some))


def _compare_beside(
    passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, norms: Tensor | None = None, apart: int = 1
) -> None:
    """Refuse a model in which a record's norm changes when its partner is replaced by a copy of the record.

    Partners are `apart` places apart. The record keeps its place in the batch, so the model draws the same random
    numbers for it. `norms` `[b]` are those of the batch with this seed, where they are known already.
    """
    together = seeded_norms(passes, features, labels, seed) if norms is None else norms
    if not _changed_beside(passes, features, labels, seed, together, apart):
        return
    if draws(passes, features, labels, seed):
        with evaluating(passes.model):
            together = seeded_norms(passes, features, labels, seed)
            by_chance = not _changed_beside(passes, features, labels, seed, together, apart)
        if by_chance:
            raise EquidpError(
                "A record's gradient changes with the other records of its batch, by the random numbers that the model "
                "draws in training: it mixes records by chance, or draws as many as the batch's longest record wants. "
                "Pad all records to one length, or leave the dropout out."
            )
    raise mixed()


def _changed_beside(
    passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, together: Tensor, apart: int
) -> bool:
    places = torch.arange(len(features), device=features.device)
    second = places // apart % 2
    for kept in range(2):
        taken = (places + apart * (kept - second)).clamp(max=len(places) - 1)
        beside = seeded_norms(passes, features[taken], labels[taken], seed)
        if not close(passes, together[taken == places], beside[taken == places]):
            return True
    return False


def _compare_draws(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> None:
    """Try several draws of a model at parameters nearby, or at its own those whose gradients are not finite there."""
    near = nearby(passes)  # there alone, because which records meet by chance does not depend on the parameters
    for draw in range(1, DRAWS):
        with passes.parameters_at(near):
            together = seeded_norms(passes, features, labels, seed + draw)
            if shown := bool(together.isfinite().all()):
                _compare_beside(passes, features, labels, seed + draw, together)
        if not shown:
            _compare_beside(passes, features, labels, seed + draw)


@contextlib.contextmanager
def _undrawn(
    passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, norms: Tensor, *, drawn: bool
) -> Iterator[Tensor | None]:
    """Yield the norms of the model without its random numbers, which differ with a record's place in the batch.

    One number takes the place of all that are seen (`Drawing`). Where others are left, the model is also put into
    evaluation mode; None if it still draws there, or from another generator than torch's.

    Args:
        passes: the forward and backward passes of the model.
        features: `[b, …]`.
        labels: `[b, …]`.
        seed: of the first draw.
        norms: `[b]`, of the model as it is, with this seed.
        drawn: whether random numbers were drawn for them.
    """
    if not drawn:
        yield norms if close(passes, norms, seeded_norms(passes, features, labels, seed + 1)) else None
        return
    for evaluated in (False, True):
        with evaluating(passes.model) if evaluated else NOTHING, Drawing(passes):
            first, second = (seeded_norms(passes, features, labels, seed + draw) for draw in (0, 1))
            # numbers that nobody sees may move norms by next to nothing, so that two draws are close by chance alone
            draws_on = not evaluated or draws(passes, features, labels, seed)
            if first.equal(second) if draws_on else close(passes, first, second):
                yield first
                return
    yield None


def _compare_each(
    passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, owners: Tensor | None = None
) -> None:
    """Compare the gradient of every record (or unit) and its norm with those of autograd."""
    norms = seeded_norms(passes, features, labels, seed, owners)
    alone = torch.ones_like(norms).diag()
    ours, larger = [passes.weighted_sum(one) for one in alone], passes.overstatement()
    expected = [_by_autograd(passes, features, labels, seed, owners, one) for one in alone]
    for mine, true in zip(ours, expected, strict=True):
        _compare_sums(passes, features, mine, true, norms)
    true_norms = torch.stack([true.double().norm() for true in expected])  # float32 loses digits over many squares
    allowed, most = TOLERANCE[passes.precision], (true_norms.square() + larger).sqrt()
    slack = allowed * 1e-6
    # asks for "within", not "outside": NaN is neither
    if not ((norms >= (1 - allowed) * true_norms - slack) & (norms <= (1 + allowed) * most + slack)).all():
        raise EquidpError(
            f"The norms of {'records' if owners is None else 'units'}' gradients are not those of autograd, though the "
            "gradients are: clipping by them would not bound what one adds. A gradient rule or a layer of your own is "
            "at fault; write the model from other layers."
        )


def _by_autograd(
    passes: BookKeeping,
    features: Tensor,
    labels: Tensor,
    seed: int,
    owners: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    reseed(passes, seed)
    try:
        return passes.plain_sum(features.clone(), labels.clone(), owners=owners, weights=weights)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        reason = str(error).partition(": ")[2].partition(";")[0]
        raise EquidpError(
            f"What a layer of the model needs again is changed in place after use ({reason}); copy it first."
        ) from error


def _kept(passes: BookKeeping) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that is released with the model: parameters, trained or not, and buffers."""
    yield from passes.model.named_parameters()
    yield from passes.model.named_buffers()


def _kept_now(passes: BookKeeping) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in _kept(passes)}


def _compare_kept(passes: BookKeeping, before: dict[str, Tensor]) -> None:
    for name, value in _kept(passes):
        known = before.get(name)  # None if the forward pass made it
        if known is None or not same(value, known):
            raise changed([name], anew=known is None or known.shape != value.shape)


def _refuse_unreached(passes: BookKeeping, unreached: Sequence[nn.Parameter], expected: Tensor) -> None:
    if not unreached:
        return
    names = {p: name for name, p in passes.model.named_parameters()}
    more = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
    if dict(zip(passes.parameters, passes.views(expected), strict=True))[unreached[0]].any():
        raise EquidpError(
            f"Parameter {names[unreached[0]]!r}{more} reaches the loss, but not by a call of the layer that holds it: "
            "let that layer's own forward use it (torch.nn.utils.parametrizations in place of hooks such as "
            "weight_norm's or prune's), or freeze it by requires_grad_(False), as a table of relative positions; and "
            "give the model as it is before torch.compile."
        )
    raise EquidpError(
        f"Parameter {names[unreached[0]]!r}{more} would be trained and gets no gradient, as the loss does not depend "
        "on it: noise alone would move it. Let the model use it, or freeze it by requires_grad_(False)."
    )


def _compare_sums(passes: BookKeeping, features: Tensor, ours: Tensor, expected: Tensor, norms: Tensor) -> None:
    sizes = [p.numel() for p in passes.parameters]
    allowed = TOLERANCE[passes.precision]
    found = zip(passes.parameters, ours.split(sizes), expected.split(sizes), strict=True)
    # measured by the records' norms as well, because their sum may cancel
    wrong = [p for p, mine, true in found if (mine - true).norm() > allowed * (true.norm() + 0.1 * norms.sum())]
    if not wrong:
        return
    if halved_by_itself(passes, features):
        raise EquidpError(
            "The model turns torch.autocast on in its own forward, where gradients have too few digits to be "
            'held to autograd\'s: leave it out there, and give precision="bf16" (training.precision=bf16), '
            "which runs the whole model under it."
        )
    names = {p: name for name, p in passes.model.named_parameters()}
    copied = {p for site in passes.sites if site.rule is held for p in site.parameters.values()}
    advice = (
        "Every record is given its own copy of it, along its first dimension: let that one be the records', "
        "expand(len(x), …), and transpose behind that, as for a recurrence's first state."
        if copied.issuperset(wrong)
        else "Let it be used only by the layer that owns it, and let that layer be called by its name; give a layer "
        "that computes another thing than its class of torch's a `forward` of its own; let the loss of a record depend "
        "on that record alone, and on no loss that was computed before."
    )
    raise EquidpError(f"The per-record gradients of parameter {names[wrong[0]]!r} are not those of the loss. {advice}")
