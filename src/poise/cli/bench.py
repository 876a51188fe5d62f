"""`poise bench`: what the exact limit costs on this machine, as ratios within one run."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import poise
from poise import _check
from poise import bench as measured
from poise.cli.methods import noise_word
from poise.cli.options import Debug, Json, check_outputs
from poise.cli.screen import Screen, rows_table

_ROWS = {"cpu": 10_000, "cuda": 50_000}


def bench(
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; a GPU if there is one.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Rows of logits; 10,000, or 50,000 on a GPU.")] = None,
    classes: Annotated[int, typer.Option("--classes", help="Columns of logits.")] = 1000,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Time predictions and fits on this machine against softmax and against the published loop."""
    screen = Screen(json)
    check_outputs({}, {"--json": json})
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check.choice(device.split(":")[0], _ROWS, "--device")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no CUDA device here; leave it out.")
    num_rows = _check.whole(rows or _ROWS[device.split(":")[0]], "--rows", least=400)
    with screen.working("timing") as spinner:
        tell = (lambda what: None) if spinner is None else (lambda what: spinner.update(f"timing {what} ..."))
        found = measured.run(device, num_rows, _check.whole(classes, "--classes", least=2), progress=tell)
    screen.head(f"{num_rows:,} x {classes:,} float32 logits on {found.device}, torch {found.torch}")
    screen.say(
        f"softmax takes {1000 * found.softmax_seconds:.3g} ms, the published loop of 1000 draws "
        f"{found.loop_seconds:.3g} s (20 were timed, times 50). Ratios of medians, timed in turn in one run."
    )
    columns = {
        "": "left",
        "predict": "right",
        "link": "right",
        "true": "right",
        "fit": "right",
        "loop": "right",
        "MB": "right",
    }
    cells = [
        (
            noise_word(noise),
            f"{cost.predict_by_softmax:.1f}",
            f"{cost.link_by_softmax:.1f}",
            f"{cost.needed_by_softmax:.1f}",
            f"{cost.fit_by_softmax:.0f}",
            f"{cost.loop_by_predict:,.0f}",
            "" if cost.extra_bytes is None else f"{cost.extra_bytes / 2**20:.1f}",
        )
        for noise, cost in zip(measured.NOISES, found.noises, strict=True)
    ]
    screen.show(rows_table(columns, cells))
    screen.say(
        "predict: predict_proba ÷ softmax. link: the same without judging the input. true: the true classes' "
        "probabilities alone, which a fit takes at every step, ÷ softmax. fit: the fit of this noise ÷ softmax. loop: "
        "the published loop ÷ predict. MB: memory of a prediction beyond its input and output."
    )
    screen.write_json({"poise": poise.__version__, "command": "bench"} | found.as_dict())
