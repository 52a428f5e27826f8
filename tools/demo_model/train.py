"""Train the demo model or its draft and export it.

``python -m tools.demo_model.train main`` saves a resumable state every few minutes and exports the checkpoint at the
end, and also at every save. The draft learns from the corpus and from the logits of the trained main model.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tools.demo_model.corpus import copies, documents, long_documents, with_copies
from tools.demo_model.model import SHAPES, Llama, Packed, export
from tools.demo_model.muon import Muon
from tools.demo_model.packing import batches
from tools.demo_model.tokenizer import end_ids
from torch import Tensor
from torch.nn import functional

ASSETS = Path(__file__).parents[2] / "src" / "quire" / "assets"
FOLDERS = {"main": ASSETS / "demo", "draft": ASSETS / "demo-draft"}
STEPS = {"main": 5600, "draft": 1600}  # about 30 and 6 minutes on two idle cores
LONG_EVERY = 16  # one batch in sixteen holds long conversations


@dataclass(frozen=True)
class Recipe:
    """The settings of one training run: ``steps`` of ``rows`` x ``length`` tokens, with the peak learning ``rate``.

    The attention heads that find a thing again form slowly, and JSON, tool calls and sums all need them. So there is
    nothing but copying up to the share ``alone`` of the training, and more of it up to the share ``copying``.
    """

    name: str
    steps: int
    rows: int = 16
    length: int = 160  # one document in fifty is longer, and cut
    rate: float = 0.006
    embedding_rate: float = 0.004
    seed: int = 7
    save_minutes: float = 4.0
    distil: float = 0.5
    alone: float = 0.07
    copying: float = 0.75


class Trainer:
    """Owns the model, the two optimizers and the data of one run."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, state: Path, teacher: Llama | None) -> None:
        self.recipe, self.tokenizer, self.state, self.teacher = recipe, tokenizer, state, teacher
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(recipe.seed)
        self.model = Llama(SHAPES[recipe.name]).to(self.device)
        inner = [weight for weight in self.model.layers.parameters() if weight.ndim == 2]
        others = [weight for weight in self.model.parameters() if not any(weight is one for one in inner)]
        self.muon = Muon(inner)
        self.adam = torch.optim.AdamW(others, lr=recipe.embedding_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0
        self.spent = 0.0  # seconds
        self.stopping = False

    def run(self) -> None:
        """Train to the last step; a SIGTERM ends it early, with everything saved."""
        data = self._data()
        last_save = last_print = self.spent
        mean_loss = 0.0
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        while self.step < self.recipe.steps and not self.stopping:
            began = time.monotonic()
            batch = next(data).to(self.device)
            loss = self._update(batch, self.step / self.recipe.steps)
            self.spent += time.monotonic() - began
            self.step += 1
            mean_loss = loss if self.step == 1 else 0.95 * mean_loss + 0.05 * loss
            if self.spent - last_print > 20:
                last_print = self.spent
                print(f"{self.spent:6.0f}s step {self.step} loss {mean_loss:.4f}", flush=True)
            if self.spent - last_save > self.recipe.save_minutes * 60:
                last_save = self.spent
                self.save()
        self.save()
        print(f"done: {self.step} steps in {self.spent:.0f}s, loss {mean_loss:.4f}")

    def _data(self) -> Iterator[Packed]:
        """Batches of each stage in turn; a resumed run goes on with fresh documents."""
        recipe = self.recipe
        for share, source in ((recipe.alone, copies), (recipe.copying, with_copies), (math.inf, documents)):
            seed, last = recipe.seed * 1000 + self.step, share * recipe.steps
            rng = random.Random(seed + 2)
            short = batches(self.tokenizer, source(seed), recipe.rows, recipe.length, rng)
            rows = max(1, recipe.rows * recipe.length // 1024)
            far = batches(self.tokenizer, long_documents(seed + 1), rows, 1024, rng)
            while self.step < last:
                yield next(far if self.step % LONG_EVERY == LONG_EVERY - 1 and source is not copies else short)

    def _update(self, batch: Packed, progress: float) -> float:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(batch).float()
        loss = functional.cross_entropy(logits, batch.targets)
        total = loss if self.teacher is None else self._with_teacher(loss, logits, batch)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        factor = schedule(progress)
        self.adam.param_groups[0]["lr"] = self.recipe.embedding_rate * factor
        self.muon.step(self.recipe.rate * factor)
        self.adam.step()
        self.adam.zero_grad()
        return loss.item()

    def _with_teacher(self, loss: Tensor, logits: Tensor, batch: Packed) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            wanted = self.teacher(batch).float().log_softmax(-1)
        distance = functional.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        return (1 - self.recipe.distil) * loss + self.recipe.distil * distance

    def save(self) -> None:
        """Write the resumable state and export the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
            "step": self.step,
            "spent": self.spent,
        }
        torch.save(state, self.state.with_suffix(".new"))
        self.state.with_suffix(".new").replace(self.state)
        export(self.model, FOLDERS[self.recipe.name], *end_ids(self.tokenizer))

    def resume(self) -> None:
        """Go on from the saved state, if there is one."""
        if self.state.exists():
            state = torch.load(self.state, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.muon.buffers = state["muon"]
            self.adam.load_state_dict(state["adam"])
            self.step, self.spent = state["step"], state["spent"]


def schedule(progress: float) -> float:
    """Learning rate factor: a short warm-up, then a cosine down to two percent."""
    if progress < 0.02:
        return max(0.02, progress / 0.02)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98))


def load_exported(name: str) -> Llama:
    """The exported checkpoint as a training model, in float32."""
    model = Llama(SHAPES[name])
    weights = load_file(FOLDERS[name] / "model.safetensors")
    model.load_state_dict({key.removeprefix("model."): weight.float() for key, weight in weights.items()})
    return model.eval()


def main() -> None:
    """Train one of the two models."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, default=0, help="0 for the usual number")
    parser.add_argument("--rate", type=float, default=Recipe.rate)
    parser.add_argument("--rows", type=int, default=Recipe.rows)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 for torch's choice")
    parser.add_argument("--state", type=Path, default=None, help="where the resumable state is kept")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    recipe = Recipe(args.name, args.steps or STEPS[args.name], rows=args.rows, rate=args.rate)
    tokenizer = Tokenizer.from_file(str(FOLDERS["main"] / "tokenizer.json"))
    state = args.state or Path("build") / f"demo-{args.name}.pt"
    state.parent.mkdir(parents=True, exist_ok=True)
    teacher = load_exported("main") if args.name == "draft" else None
    trainer = Trainer(recipe, tokenizer, state, teacher)
    if teacher is not None:
        teacher.to(trainer.device)
    if args.resume:
        trainer.resume()
    print(f"{sum(weight.numel() for weight in trainer.model.parameters())} weights on {trainer.device}", flush=True)
    trainer.run()


if __name__ == "__main__":
    main()
