"""What a person sees of a calibration: progress while it runs, the fit and the record when it is done."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_ext.hub import local_folder
from sglang_ext.offline.bars import Bars
from sglang_ext.offline.calibrate import calibrate
from sglang_ext.offline.checkpoint import Checkpoint
from sglang_ext.offline.compare import compare
from sglang_ext.offline.corpus import encode, read_prompts
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.offline.settings import Progress, Settings
from sglang_ext.transfer.pack import Manifest


class RichProgress(Bars, Progress):
    """Of a calibration: two bars."""

    def tokens(self, seen: int, wanted: int) -> None:
        self.show("calibration tokens", seen, wanted)

    def prompts(self, seen: int, wanted: int) -> None:
        self.show("acceptance prompts", seen, wanted)

    def resumed(self, prompts: int) -> None:
        self.say(f"going on from a checkpoint: the first {prompts} prompts are read again, not run")

    def left_out(self, prompts: int) -> None:
        self.say(f"{prompts} prompts of fewer than two tokens were left out")


def calibrate_and_report(
    source: str, target: str, data: str, out: Path, settings: Settings, device: str, checkpoint_every: int
) -> None:
    """Loads both models, writes the pack to `out` and prints its fit and acceptance.

    With several structures each pack goes to the folder of its structure inside `out`, and a comparison of
    them beside. A calibration that was killed goes on from its checkpoint, which a finished one deletes.
    """
    from transformers import AutoTokenizer

    folders = local_folder(source), local_folder(target)
    tokenizer = AutoTokenizer.from_pretrained(str(folders[1]))
    left, right = (TransformersExecutor.from_folder(folder, device) for folder in folders)
    prompts = (encode(tokenizer, record) for record in read_prompts(data))
    names = (folders[0].name, folders[1].name)
    checkpoint = Checkpoint(out, checkpoint_every)
    with RichProgress() as progress:
        packs = calibrate(left, right, names, data, prompts, settings, progress, checkpoint)
    console = Console()
    for structure, pack in packs.items():
        folder = out if len(packs) == 1 else out / structure
        packs[structure] = pack.save(folder)
        show(packs[structure].manifest, console)
        console.print(f"pack {packs[structure].digest[:12]} written to {folder}")
    if len(packs) > 1:
        compare(list(packs.values()), out, console)
    checkpoint.delete()


def show(manifest: Manifest, console: Console) -> None:
    """Prints R-squared per layer and side, the four arms and the attention cosine."""
    table = Table(
        title=f"{manifest.name}: {manifest.source.name} -> {manifest.target.name}, "
        f"structure {manifest.structure}, {manifest.tokens} tokens"
    )
    for column in ("layer", "keys from", "R²", "held out", "values from", "R²", "held out", "attention cosine"):
        table.add_column(column, justify="right")
    record = manifest.acceptance
    for layer, sides in enumerate(manifest.layers):
        cells = [str(layer)]
        for side in ("key", "value"):
            one = sides[side]
            cells += [",".join(map(str, one.sources)), f"{one.r2:.3f}", f"{one.r2_held_out:.3f}"]
        table.add_row(*cells, f"{record.attention_cosine[layer]:.4f}" if record else "-")
    console.print(table)
    if record is None:
        console.print("no acceptance record: the pack is bench-only")
        return
    asked = "" if record.coverage is None else f" (coverage {record.coverage})"
    arms = Table(title=f"acceptance on {record.prompts} held-out prompts, rho = {record.rho}{asked}, {record.selector}")
    for column in ("cache", "agreement with the target", "KL, nats per token"):
        arms.add_column(column, justify="right")
    for name in ("target", "lifted", "wrong_prompt", "no_context"):
        arm = getattr(record, name)
        arms.add_row(name.replace("_", " "), f"{arm.agreement:.3f}", f"{arm.kl:.4f}")
    console.print(arms)
    console.print(f"recovered share of the target's agreement: {record.recovered:.3f}")
