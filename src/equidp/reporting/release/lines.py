"""Documents of lines: a question, its answer and the figures behind it, as JSON and as Markdown from one source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equidp.reporting.markdown import markdown_table, markdown_text
from equidp.reporting.release.facts import Facts

OPEN = "Open"


@dataclass(frozen=True)
class Line:
    """One line of a document.

    Attributes:
        key: its name in JSON.
        question: what is asked, as a phrase.
        answer: the answer in words; for an open line, what is missing, or who can tell it.
        value: the figures behind the answer, JSON types; None if there are none.
        open: whether neither the run nor the settings answer it.
        table: rows for the reader, the header first; empty if none.
    """

    key: str
    question: str
    answer: str
    value: Any = None
    open: bool = False
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Document:
    """A title, the document's purpose, lines by topic, why it is not for publication, and more entries for JSON."""

    title: str
    purpose: str
    topics: Mapping[str, Sequence[Line]]
    warning: str | None
    extra: Mapping[str, Any]


def document(facts: Facts, title: str, purpose: str, topics: Mapping[str, Sequence[Line]], **extra: Any) -> Document:
    """A document about a run."""
    return Document(f"{title}: {facts.algorithm} on {facts.dataset}", purpose, topics, facts.warning, extra)


def stated(key: str, question: str, statements: Mapping[str, str], missing: str = "The run does not know.") -> Line:
    """A line that only the curator can answer, by the setting `release.<key>`; without that it is open."""
    answer = statements.get(key)
    if answer:
        return Line(key, question, f"{answer} (stated by the curator)", answer)
    return Line(key, question, f"{missing} Answer it by the setting release.{key}.", open=True)


def open_lines(document: Document) -> list[Line]:
    """The lines that nothing answers."""
    return [line for lines in document.topics.values() for line in lines if line.open]


def as_json(document: Document) -> str:
    """The machine's form."""
    return to_json(
        {
            "title": document.title,
            "purpose": document.purpose,
            **publication(document.warning),
            **document.extra,
            "open": [line.key for line in open_lines(document)],
            "topics": {
                topic: {
                    line.key: {
                        "question": line.question,
                        "status": "open" if line.open else "answered",
                        "answer": line.answer,
                        **({} if line.value is None else {"value": line.value}),
                    }
                    for line in lines
                }
                for topic, lines in document.topics.items()
            },
        }
    )


def as_markdown(document: Document) -> str:
    """The reader's form."""
    parts = [f"# {markdown_text(document.title)}", document.purpose]
    if document.warning:
        parts.append(f"**{document.warning}**")
    missing = open_lines(document)
    every = sum(map(len, document.topics.values()))
    parts.append(f"{every - len(missing)} of {every} lines are answered, {len(missing)} open.")
    for topic, lines in document.topics.items():
        parts.append(f"## {topic}")
        for line in lines:
            mark, state = (" ", f" *{OPEN}.*") if line.open else ("x", "")
            parts.append(f"- [{mark}] **{line.question}**{state} {markdown_text(line.answer)}")
            if line.table:
                parts.append(markdown_table(line.table))
    return "\n\n".join(parts) + "\n"


def publication(warning: str | None) -> dict[str, Any]:
    """What every JSON document says first: whether it may be published, and if not, why."""
    return {"for_publication": warning is None} | ({} if warning is None else {"warning": warning})


def to_json(content: Mapping[str, Any]) -> str:
    """JSON text that is the same for the same content."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
