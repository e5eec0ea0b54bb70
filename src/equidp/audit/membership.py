"""Membership inference in every group: which training records does the trained model reveal?

There are two attacks. Each gives a score per record, larger for records that seem to have been trained on:

* *loss threshold* (Yeom et al. 2018): minus the model's loss. Cheap; takes easy records for members.
* *reference model* (Watson et al. 2022; Ye et al. 2022, "Attack R"): the mean loss of models that did not see the
  record minus the model's loss, which removes each record's own difficulty. The reference models are trained
  without privacy on halves of a pool of members and non-members; an attacker with such a pool is stronger than most.

Members are records of the training part, non-members records of the test part. If the two parts are not draws from one
distribution (another year, another balance of the classes), an attack may distinguish them without any leak. So read
the figures by group, and compare them with those of a model that cannot leak. Both the attacks and their figures use
exact training data: they are findings of an audit, outside the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from equidp.data.records import MIN_TEST_RECORDS
from equidp.mechanism.noise import derived_seed

FALSE_POSITIVE_RATE = 0.01
"""The false positive rate of an attacker who is rarely wrong (Carlini et al. 2022)."""

FEWEST = round(5 / FALSE_POSITIVE_RATE)
"""If a side has fewer units, the rate is not reported, because hardly any unit would be beyond such a threshold."""

Scores = np.ndarray


def reference_scores(model_losses: Tensor, reference_losses: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor:
    """Return the scores of the reference-model attack, `[N]`.

    Args:
        model_losses: `[N]` losses of the attacked model.
        reference_losses: per reference model, `[N]` losses.
        seen: per reference model, `[N]` bool, which records it was trained on; each record is unseen by at least one.
    """
    unseen = ~torch.stack(list(seen))
    count = unseen.sum(0)
    if not bool((count > 0).all()):
        raise ValueError("Every record needs a reference model that has not seen it.")
    return (torch.stack(list(reference_losses)) * unseen).sum(0) / count - model_losses


def halves(records: int, pairs: int, seed: int) -> list[Tensor]:
    """Return `2·pairs` masks `[N]`. The two of a pair are complements, so half of the models do not see a record."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "audit/references"))
    masks = []
    for _ in range(pairs):
        mask = torch.zeros(records, dtype=torch.bool)
        mask[torch.randperm(records, generator=generator)[: records // 2]] = True
        masks += [mask, ~mask]
    return masks


def exposure(
    member: Scores,
    non_member: Scores,
    units: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> dict:
    """Return AUC and TPR at 1 % FPR of an attack on one group, each with a bootstrap interval.

    Args:
        member: scores of the training records.
        non_member: scores of the test records.
        units: numbers for both sides, equal for records of one unit; None if each unit has one record.
        resamples: number of bootstrap resamples of whole units, for members and non-members separately.
        confidence: of the intervals (percentiles).
        seed: of the resampling.

    Returns:
        `members`, `non_members` (counts), `auc`, `auc_interval`, `tpr_at_1_percent_fpr` and its interval. Both figures
        are None if a side has fewer than `MIN_TEST_RECORDS` units, because resampling finds too little spread (for one
        unit against one none at all). The second is None below `FEWEST` units. Both are None if a score is not finite,
        because a model that has diverged distinguishes no records.
    """
    counts = {"members": len(member), "non_members": len(non_member)}
    sides = units or (np.arange(len(member)), np.arange(len(non_member)))
    distinct, owners = zip(*(np.unique(side, return_inverse=True) for side in sides), strict=True)
    finite = np.isfinite(member).all() and np.isfinite(non_member).all()
    fewest = min(map(len, distinct)) if finite else 0
    measures: Mapping[str, Callable[[Scores, Scores], float] | None] = {
        "auc": _auc if fewest >= MIN_TEST_RECORDS else None,
        "tpr_at_1_percent_fpr": _tpr if fewest >= FEWEST else None,
    }
    found: dict = {}
    for name, measure in measures.items():
        found[name] = None if measure is None else measure(member, non_member)
        found[f"{name}_interval"] = (
            None if measure is None else _interval(measure, (member, non_member), owners, resamples, confidence, seed)
        )
    return counts | found


def exposure_per_group(
    member: Tensor,
    non_member: Tensor,
    member_groups: Tensor,
    non_member_groups: Tensor,
    names: Sequence[str],
    units: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> dict[str, dict]:
    """Return `exposure` of every group of one grouping, by the group's name."""
    return {
        name: exposure(
            member[member_groups == k].numpy(),
            non_member[non_member_groups == k].numpy(),
            units and (units[0][(member_groups == k).numpy()], units[1][(non_member_groups == k).numpy()]),
            resamples=resamples,
            confidence=confidence,
            seed=seed,
        )
        for k, name in enumerate(names)
    }


def at_most(groups: Tensor, most: int | Tensor, seed: int) -> Tensor:
    """Return positions, ascending, of at most `most` records of each group, drawn at random.

    `most` is a number for all groups, or `[K]`, a number for each group.
    """
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(derived_seed(seed, "audit/attacked")))
    ids = groups.unique()
    limits = [most] * len(ids) if isinstance(most, int) else most[ids].tolist()
    kept = [order[groups[order] == k][:limit] for k, limit in zip(ids, limits, strict=True)]
    return torch.cat(kept).sort().values if kept else order


def alike(members: Tensor, non_members: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return positions of equally many members and non-members of each group, drawn at random.

    If the two sides had different shares of the groups, an attack could distinguish them by the groups, without a leak.
    """
    most = max(int(ids.max()) + 1 if len(ids) else 0 for ids in (members, non_members))
    counts = torch.minimum(*(torch.bincount(ids, minlength=most) for ids in (members, non_members)))
    return at_most(members, counts, seed), at_most(non_members, counts, seed)


def _auc(member: Scores, non_member: Scores) -> float:
    truth = np.repeat([1, 0], [len(member), len(non_member)])
    return float(roc_auc_score(truth, np.concatenate([member, non_member])))


def _tpr(member: Scores, non_member: Scores) -> float:
    """Return the true positive rate at the lowest threshold that a new non-member exceeds with probability 1 % at most.

    A new non-member exceeds the k-th largest of n non-members with probability k/(n + 1). The rate among these n,
    (k − 1)/n, is too small: if one of 100 may exceed the threshold, twice as many new records will, non-members and
    members alike.
    """
    k = int(FALSE_POSITIVE_RATE * (len(non_member) + 1))
    return float((member > np.partition(non_member, -k)[-k]).mean())


def _interval(
    measure: Callable[[Scores, Scores], float],
    sides: tuple[Scores, Scores],
    owners: Sequence[np.ndarray],
    resamples: int,
    confidence: float,
    seed: int,
) -> list[float]:
    """Return the bootstrap interval. `owners` has for both sides each record's unit, numbered from 0 without gaps."""
    generator = np.random.default_rng(derived_seed(seed, "audit/bootstrap"))

    def drawn(scores: Scores, owner: np.ndarray) -> Scores:
        """Return a resample of as many units as there are, each with all its records, because these leak together."""
        count = int(owner.max()) + 1
        times = np.bincount(generator.integers(count, size=count), minlength=count)
        return np.repeat(scores, times[owner])

    values = [measure(*map(drawn, sides, owners)) for _ in range(resamples)]
    tail = (1 - confidence) / 2
    return [float(value) for value in np.quantile(values, [tail, 1 - tail])]
