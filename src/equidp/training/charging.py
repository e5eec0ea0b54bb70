"""What a run enters in its data set's ledger: before its training begins, and again later if it was charged more."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from equidp.accounting.dataset_ledger import FILE, NAMES, DatasetLedger, Entry
from equidp.accounting.events import Event, beyond
from equidp.accounting.plan import Plan
from equidp.accounting.trials import Trials
from equidp.data.groupings import SPELLING
from equidp.data.records import Membership
from equidp.data.sources import record_words, source
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.parameters import Settings
from equidp.system.files import replacing
from equidp.training.checkpoint import charged_until_now
from equidp.training.statement import figures_entry

CHARGED = "charged.json"
"""File beside the checkpoints with the run's names in the ledger. The run has a name for each set of settings that it
was begun with, so that a run that is continued is entered once."""


logger = logging.getLogger(__name__)

DIGEST = 64
"""Length of a digest of raw files; sources without files have a word instead of a digest."""


def planned(algorithm: Algorithm, plan: Plan) -> dict[str, Any]:
    """The most that one training is charged, in the form of a ledger's entry.

    Under a cap on the number of trainings each of them enters its own events, because each is a run.
    """
    if (budget := algorithm.budget(plan)) is not None:
        return {"order": float(budget.order), "total": budget.total}
    return {"events": tuple(algorithm.events(plan))} | of_law(plan.trials)


def of_law(trials: Trials) -> dict[str, Any]:
    """The law of the number of trials, in the form of a ledger's entry; empty if there is none."""
    if trials.law is None:
        return {}
    return {"law": trials.law, "mean": trials.mean, "shape": trials.shape, "orders": trials.orders}


def stated_beyond(statement: Mapping[str, Any], trials: Trials, plan: Sequence[Event]) -> tuple[Event, ...]:
    """The events that a statement's ε is of, beyond the plan; a run that may stop early was charged less than these."""
    stated = map(Event.from_dict, statement.get("charged", statement["ledger"]))
    return beyond(stated, trials.charged(plan))  # under a cap, each of the other trials enters its own


def repeated(workplace: Path, algorithm: Algorithm, plan: Plan) -> tuple[Event, ...]:
    """What a secure run that is continued is charged beyond its plan, even if it dies before it can enter that itself.

    Its next steps are new releases. So everything that was charged, except for the steps before its checkpoint, is
    beyond the plan. If there is any, and the run may stop early, all that was charged is beyond it, because the new
    process may go on to the cap.
    """
    steps, charged = charged_until_now(workplace)
    more = beyond(charged, () if steps is None else algorithm.events_until(plan, steps))
    return more if algorithm.fixed or not more else charged


def ledger_of(folder: Path, settings: Settings, provenance: Mapping[str, Any] | None = None) -> DatasetLedger:
    """The ledger of a run's data set, by all names of the data set, in the ledger's folder.

    Without `provenance` (where the records came from) the digest of the records is known only from earlier entries.
    """
    data, names = settings.data, [settings.dataset]
    where = [f"{option}={data.options[option]}" for option in ("connection", "catalog") if data.options.get(option)]
    if path := data.options.get("path"):
        where.append(f"path={(Path(settings.raw_dir) / str(path)).resolve()}")
    names += where or [f"source={data.source}"]  # without such options a source reads its own data
    known = provenance or {}
    # the digest of the records alone, if it is known: read with another tokenizer, they are still the same people's
    digest = known.get("records_fingerprint", known.get("raw_fingerprint", ""))
    if len(digest) == DIGEST:  # if not, it is a word that many sources share
        names.append(f"digest={digest}")
    if settings.privacy.ledger:
        names.append(f"ledger={settings.privacy.ledger}")
    return DatasetLedger(folder, *names)


def unit_in_ledger(unit: str, source_name: str, options: Mapping[str, Any]) -> str:
    """The name in entries of what a run with this `privacy.unit` protects: `record`, or the source's word for a unit.

    For a finished run, its statement and its model's card have the three arguments: a later command may leave the
    settings out.
    """
    if unit in record_words():
        return "record"
    word = source(source_name, options).words()[1] if unit == "unit" else unit
    return f"column {word}" if word == "record" else word  # "record" alone means a single row


def enter(
    folder: Path,
    workplace: Path,
    settings: Settings,
    provenance: Mapping[str, Any],
    membership: Membership | None,
    releases: Mapping[tuple[str, str], Mapping[str, Any]],
    *,
    algorithm: str,
    run: str | None = None,
) -> str:
    """Enter a run's releases, and the figures that it will release, in the data set's ledger; returns the run's name.

    A run that is continued is entered already if it will be charged what was entered then. Otherwise it is entered
    anew. Names that its data set has got since then are entered, too, because a later run under these names would not
    know of it.

    Args:
        folder: the ledger's.
        workplace: the run's, where a run that is continued finds its name.
        settings: the run's.
        provenance: where its records came from.
        membership: how the training part was drawn.
        releases: by (what, part), what each is charged.
        algorithm: its name.
        run: the run's name, once it has trained. Entries that the file has lost since are entered again, without a
            limit, because what has happened cannot be undone.

    Raises:
        EquidpError: if `privacy.total_epsilon` would be exceeded, or a run that was begun without a guarantee is
            continued with one.
    """
    ledger, place = ledger_of(folder, settings, provenance), workplace / CHARGED
    privacy = settings.privacy
    entries = partial(_entries, settings, provenance, membership, releases, algorithm)
    if run is not None:
        there = [entry for entry in ledger.entries() if entry.run == run]
        if gone := [entry for entry in entries(run) if entry not in there]:
            logger.warning(
                "%s has lost this run's entry since it began (was an older copy put back?): it is entered again. "
                "Entries of other runs may be lost too.",
                ledger.path,
            )
            ledger.add(gone)
        return run
    begun: list[str] = []
    here = [settings.dataset, settings.seed, settings.run_label]
    kept = json.loads(place.read_text(encoding="utf-8")) if settings.resume and place.is_file() else {}
    if kept.get("of", here) == here:  # a copied workplace is a run of its own: it and the first one both train the rest
        begun, before = kept.get("runs", []), ledger.entries()
        for known in begun:
            mine, asked = [entry for entry in before if entry.run == known], entries(known)
            if mine[: len(asked)] != asked:  # entered with other settings: it was charged for something else
                continue
            if privacy.total_adaptive and any(entry.secure and entry.limit is None for entry in mine):
                raise EquidpError(
                    f"The run in {workplace} was begun without the limit of privacy.total_adaptive=true, which only a "
                    "data set's first secure run can fix: leave it out to go on."
                )
            if not set(ledger.names) <= {name for entry in mine for name in entry.data}:
                named = Entry(known, NAMES, algorithm, split="", part="", unit="", secure=False)
                ledger.add([named])
            return known
    run = secrets.token_hex(8)
    with replacing(place) as part:  # before the entry: after a crash between the two, the run is entered anew
        part.write_text(json.dumps({"runs": [*begun, run], "of": here}), encoding="utf-8")
    ledger.charge(entries(run), delta=privacy.delta, limit=privacy.total_epsilon, adaptive=privacy.total_adaptive)
    return run


def _entries(
    settings: Settings,
    provenance: Mapping[str, Any],
    membership: Membership | None,
    releases: Mapping[tuple[str, str], Mapping[str, Any]],
    algorithm: str,
    run: str,
) -> list[Entry]:
    """The entries of a run: its releases, and the figures that it will release."""
    privacy, data = settings.privacy, settings.data
    raw = " ".join(str(provenance.get(of)) for of in ("raw_fingerprint", "version", "encoding"))
    split = _split(membership, settings, run, raw, held=("tuning", "train") in releases)
    found = dict(releases)
    if figures := figures_entry(privacy, data).get("evaluation"):
        event = Event.from_dict(figures["mechanism"])
        found["figures", figures["part"]] = {"events": (event,)} | of_law(privacy.trials)
    unit, secure = unit_in_ledger(privacy.unit, data.source, data.options), privacy.secure
    return [Entry(run, what, algorithm, split, part, unit, secure, **of) for (what, part), of in found.items()]


def enter_more(folder: Path, settings: Settings, run: str, more: Sequence[Event], *, ahead: bool = False) -> None:
    """Enter all that a continued training is charged beyond its plan, if it is not entered yet.

    What has happened cannot be undone, so no limit applies to it. Nor does one to what is ahead, so that a run that was
    interrupted can be finished, unless the limit is to be a guarantee (`accounting/limit.py`).

    Where the best of several trials is released, each of them may have been charged as much. The new entry then has all
    events of a trial, and takes the place of the first one (`dataset_ledger`).

    Args:
        folder: the ledger's.
        settings: the run's.
        run: its name.
        more: what it is charged beyond what was entered as it began.
        ahead: whether that is still to happen.

    Raises:
        EquidpError: the limit has no room for it; or the file has lost the run, is held, damaged, or cannot be written.
    """
    entries = DatasetLedger(folder, settings.dataset).entries()
    own = [entry for entry in entries if entry.run == run and entry.part == "train"]
    if not own:
        raise EquidpError(
            f"{folder / FILE} has lost the entry of this run ({run}): put the file back, and go on with resume=true."
        )
    first, *later = own
    if first.law is None:
        due = events = beyond(more, [event for entry in later for event in entry.events])
    else:
        events = (*first.events, *more)
        due = beyond(events, later[-1].events if later else first.events)
    if due:
        again = dataclasses.replace(first, events=events)
        ledger, kept = DatasetLedger(folder, *first.data), first.limit
        if not ahead or kept is None:
            ledger.add([again])
            return
        try:
            ledger.charge([again], delta=kept.delta, limit=kept.epsilon, adaptive=True)
        except EquidpError as error:
            raise EquidpError(
                f"The steps after this run's last checkpoint would be taken again, and are charged again. {error}"
            ) from error


def _split(membership: Membership | None, settings: Settings, run: str, raw: str, *, held: bool) -> str:
    """Return a name for the split; two splits have one name only if their parts are the same function of each record.

    The name has a digest of the source and its options, in their order, because a record's identity is made of what
    these read. The digest covers the raw data as well, and the code that reads them, if that identity is not a declared
    id, or if the data give the test part: a person whose row has changed, or is read in another way, may then be in
    another part than before. How a declared id is read changes only with `SPELLING`.
    """
    how, data = "given" if membership is None else membership.how, settings.data
    if how not in ("hash", "provider"):
        return run
    assert membership is not None
    part = "validation" if held else data.evaluate_on
    facts = (how, membership.key, repr(data.test_fraction), data.split_by, part)
    stays = how == "hash" and not membership.given and (data.id or data.split_unit == "unit")
    made = json.dumps([facts, data.source, data.options, data.id, SPELLING if stays else raw], default=str)
    return "/".join((*facts, hashlib.sha256(made.encode()).hexdigest()[:16]))
