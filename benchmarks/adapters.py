"""What privacy adds to a step that trains adapters: LoRA on a small BERT, against its own step without privacy.

    python benchmarks/adapters.py                                  # on two cores that do nothing else
    python benchmarks/adapters.py --threads 1 --clock processor    # on a busy machine

The network has random weights, 4 layers of 256 numbers and texts of 128 tokens: its size decides the time, not its
values. Contenders take turns as in speed.py; printed is the median of the ratios of the same round, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from speed import SEED, Bench, Stopwatch, random_records, ratio, settle_memory

from equidp.accounting.plan import Plan
from equidp.data.records import Schema
from equidp.data.tokens import tokenizer_digest
from equidp.models import build_model

SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1_024}
VOCABULARY, LENGTH = 8_000, 128


class TextBench(Bench):
    """A BERT of random weights, of which `trainable` is trained."""

    def __init__(self, trainable: str, batch_size: int) -> None:
        torch.manual_seed(SEED)
        self.model, facts = bert(trainable)
        self.records = random_records(facts, 4 * batch_size)
        self.public = random_records(facts, batch_size)
        self.plan = Plan(len(self.records), batch_size, 1_000, 2, 1e-5, 1.0)
        self.device = torch.device("cpu")


def bert(trainable: str) -> tuple[nn.Module, Schema]:
    """The model, read from a folder as from a hub, and what its records are."""
    import transformers

    with tempfile.TemporaryDirectory() as name:
        config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SIZES)
        transformers.BertModel(config).save_pretrained(name)
        (Path(name) / "vocab.txt").write_text("\n".join(map(str, range(VOCABULARY))))
        two = ("no", "yes")
        own = tokenizer_digest(Path(name))
        facts = Schema("text", "text", (LENGTH,), two, {"class": two}, vocabulary=VOCABULARY, tokenizer=own)
        options = {"network": f"hf:{name}", "trainable": trainable}
        return build_model("backbone", facts, options=options, seed=SEED), facts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trainable", default="lora", choices=["head", "bias", "norm", "lora", "all"])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turn", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    settle_memory()
    bench = TextBench(args.trainable, args.batch_size)
    watch = Stopwatch(bench.device, time.process_time if args.clock == "processor" else time.perf_counter)
    steps = {"sgd": bench.step("sgd"), "dpsgd": bench.step("dpsgd"), "floor": bench.floor()}
    times = watch.interleaved(steps, args.rounds, args.turn)
    found: dict[str, object] = {**vars(args), "torch": torch.__version__}
    found["sgd_ms"] = round(1e3 * statistics.median(times["sgd"]), 1)
    for name in ("dpsgd", "floor"):
        middle, low, high = ratio(times[name], times["sgd"])
        found[f"{name}_over_sgd"] = [round(value, 3) for value in (middle, low, high)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
