"""Draws the pictures of architecture.md: what goes over the wire, rank by rank, from left to right in time.

python docs/_static/make_pictures.py        # writes all_reduce.svg, fsdp_step.svg and diloco_interval.svg next to itself
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
ROW, LEFT, BAR = 74, 90, 26
COLOURS = {
    "compute": "#9db4c0",
    "encode": "#f2c14e",
    "send": "#5b8e7d",
    "decode": "#f78154",
    "apply": "#b56576",
    "wait": "#e8e8e8",
}


class Picture:
    """Rows of bars, a row a rank, and arrows between them. All positions are pixels."""

    def __init__(self, title: str, rows: list[str], width: int) -> None:
        self._width, self._height = width, 60 + ROW * len(rows) + 34
        self._parts = [f'<text x="12" y="24" class="title">{escape(title)}</text>']
        for i, row in enumerate(rows):
            y = self._y(i)
            self._parts.append(f'<text x="12" y="{y + 17}" class="row">{escape(row)}</text>')
            self._parts.append(
                f'<line x1="{LEFT}" y1="{y + BAR / 2}" x2="{width - 12}" y2="{y + BAR / 2}" class="line"/>'
            )

    @staticmethod
    def _y(row: int) -> int:
        return 48 + ROW * row

    def bar(self, row: int, at: int, width: int, kind: str, text: str = "") -> None:
        """Draws a rank's work: a bar in the colour of its kind, with a text in it."""
        y = self._y(row)
        self._parts.append(
            f'<rect x="{LEFT + at}" y="{y}" width="{width}" height="{BAR}" rx="4" fill="{COLOURS[kind]}"/>'
            f'<text x="{LEFT + at + width / 2}" y="{y + 17}" class="bar">{escape(text)}</text>'
        )

    def bars(self, row: int, *bars: tuple[int, int, str, str]) -> None:
        """Draws bars of one row, each (at, width, kind, text)."""
        for bar in bars:
            self.bar(row, *bar)

    def arrow(self, sender: int, receiver: int, start: int, end: int, text: str = "") -> None:
        """A message: from the edge of one row to that of another."""
        down = receiver > sender
        y1 = self._y(sender) + (BAR if down else 0)
        y2 = self._y(receiver) + (0 if down else BAR)
        x1, x2 = LEFT + start, LEFT + end
        self._parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="arrow" marker-end="url(#head)"/>')
        if text:
            self._parts.append(
                f'<text x="{(x1 + x2) / 2 + 6}" y="{(y1 + y2) / 2 + 4}" class="note">{escape(text)}</text>'
            )

    def note(self, row: int, at: int, text: str) -> None:
        """A text under a row."""
        self._parts.append(f'<text x="{LEFT + at}" y="{self._y(row) + BAR + 15}" class="note">{escape(text)}</text>')

    def write(self, name: str) -> None:
        """Writes the SVG, with a legend of the colours that are in it."""
        x, legend = LEFT, []
        for kind, colour in COLOURS.items():
            if any(colour in part for part in self._parts):
                y = self._height - 22
                legend.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}"/>')
                legend.append(f'<text x="{x + 20}" y="{y + 12}" class="note">{kind}</text>')
                x += 90
        style = (
            "text{font-family:sans-serif;fill:#222}.title{font-size:15px;font-weight:bold}.row{font-size:13px}"
            ".bar{font-size:11px;text-anchor:middle}.note{font-size:11px;fill:#444}.line{stroke:#ccc}"
            ".arrow{stroke:#5b8e7d;stroke-width:1.6}"
        )
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="#5b8e7d"/></marker></defs>'
        )
        (HERE / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" height="{self._height}" '
            f'viewBox="0 0 {self._width} {self._height}"><style>{style}</style>{head}'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(self._parts)}{"".join(legend)}</svg>\n'
        )


def all_reduce() -> None:
    """Two phases among three ranks, of which rank 1 owns the slice that is drawn."""
    picture = Picture("all_reduce of one tensor: the slice that rank 1 owns", ["rank 0", "rank 1", "rank 2"], 960)
    for rank in range(3):
        picture.bar(rank, 0, 70, "send", "describe")
    for rank in (0, 2):
        picture.bar(rank, 90, 90, "encode", "encode slice 1")
        picture.arrow(rank, 1, 180, 250, "codes" if rank == 0 else "")
        picture.bar(rank, 560, 110, "decode", "decode the sum")
    picture.bar(1, 250, 120, "decode", "decode, add 0, 1, 2")
    picture.bar(1, 380, 100, "encode", "encode the sum")
    for rank in (0, 2):
        picture.arrow(1, rank, 480, 560, "codes of the sum" if rank == 0 else "")
    picture.bar(1, 560, 110, "decode", "decode the sum")
    picture.note(1, 250, "phase 1: in rank order, in float32")
    picture.note(1, 560, "phase 2: the same codes on every rank")
    picture.write("all_reduce")


def fsdp_step() -> None:
    """Two ranks, two layers, forward and backward, with overlap."""
    picture = Picture("An FSDP2 step of two layers, with overlap", ["rank 0", "wire", "rank 1"], 1030)
    for rank in (0, 2):
        picture.bars(
            rank,
            (0, 70, "encode", "encode w1"),
            (165, 105, "compute", "forward 1"),
            (275, 105, "compute", "forward 2"),
            (475, 125, "compute", "backward 2"),
            (605, 125, "compute", "backward 1"),
            (840, 80, "apply", "optimizer"),
        )
    picture.bars(
        1,
        (75, 85, "send", "gather w1"),
        (170, 95, "send", "gather w2"),
        (385, 85, "send", "gather w2"),
        (480, 95, "send", "gather w1"),
        (605, 105, "send", "reduce g2"),
        (735, 100, "send", "reduce g1"),
    )
    picture.note(1, 75, "8 bits a weight")
    picture.note(1, 605, "8 bits a gradient; norms and biases exact")
    picture.write("fsdp_step")


def diloco_interval() -> None:
    """Two ranks, two intervals: the average of the first travels during the second."""
    picture = Picture("DiLoCo, mode continue: one message an interval", ["rank 0", "wire", "rank 1"], 940)
    for rank in (0, 2):
        picture.bars(
            rank,
            (0, 250, "compute", "H inner steps"),
            (255, 75, "encode", "form Δ"),
            (335, 250, "compute", "H inner steps"),
            (590, 85, "apply", "outer step"),
            (680, 150, "compute", "…"),
        )
    picture.bar(1, 335, 170, "send", "encode and all_reduce Δ")
    picture.note(1, 335, "4 bits an element; training does not wait")
    picture.note(0, 255, "Δ: what training moved the parameters by, plus the residual")
    picture.write("diloco_interval")


if __name__ == "__main__":
    all_reduce()
    fsdp_step()
    diloco_interval()
