"""Layer maps and probes as a reader finds them. `python -m pytest tests/report/test_maps.py`"""

from typing import Any

import pytest
from probing import cells_frame

from kvdrift.report.maps import LAYERS, layer_table, maps, worst_layers
from kvdrift.report.page import Folded, Section, Table, render
from kvdrift.report.probes import probe_rows


def layers(bits: int, worst: int | None) -> list[dict[str, Any]]:
    """A map of three layers; KL and errors are largest in `worst`, and unknown if that is None."""
    none = dict.fromkeys(LAYERS)
    rows = [none | {"layer": n, "key_bits": bits, "value_bits": 4, "saved_bytes": 10 * n} for n in range(3)]
    for n, row in enumerate(rows if worst is not None else []):
        off = 2.0 if n == worst else 1.0
        row |= {"kl": 0.001 * off, "key_error": 0.1 * off, "value_error": 0.05 * off, "key_cosine": 0.99}
    return rows


MAPS = {"exact": layers(16, None), "kivi4": layers(4, 1), "kivi2": layers(2, 2)}


def told(chosen: str, probes: list[dict[str, Any]] | None = None) -> list[Section]:
    return maps({"decision": {"policy": chosen}, "layer_maps": MAPS, "probes": probes or []})


def test_every_candidate_has_its_map_the_chosen_one_first_and_whole() -> None:
    blocks = told("kivi4")[0].blocks
    tables = [block for block in blocks if isinstance(block, Table)]
    assert [row[1] for row in tables[0].rows] == ["4", "4", "4"]
    assert len(tables) == 1
    folded = [block for block in blocks if isinstance(block, Folded)]
    assert [block.line.split("`")[1] for block in folded] == ["exact", "kivi2"]
    assert [row[1] for row in folded[1].table.rows] == ["2", "2", "2"]
    assert blocks.index(tables[0]) < blocks.index(folded[0])


def test_a_line_names_the_layers_that_are_worst() -> None:
    assert worst_layers(MAPS["kivi2"]) == (
        "2-bit keys, 4-bit values, 3 layers; most KL alone in layers 2 (0.002), 0 (0.001), 1 (0.001); "
        "largest key error in layer 2 (0.2); largest value error in layer 2 (0.1)"
    )
    assert worst_layers(MAPS["exact"]).endswith("3 layers; no cell packed or measured")
    mixed = [MAPS["kivi4"][0], MAPS["kivi2"][1]]
    assert worst_layers(mixed).startswith("2- to 4-bit keys, 4-bit values, 2 layers")


def test_a_chosen_policy_without_a_map_hides_no_other() -> None:
    folded = [block for block in told("stay")[0].blocks if isinstance(block, Folded)]
    assert len(folded) == 3


def test_markdown_has_a_line_a_policy_and_html_the_table_behind_it() -> None:
    content = {"title": "t", "sections": told("kivi4"), "pictures": {}}
    markdown, page = (render(f"receipt.{kind}.jinja", **content) for kind in ("md", "html"))
    assert markdown.count("| layer | key bits |") == 1
    assert "\n\n`kivi2`: 2-bit keys" in markdown
    assert "`layers.csv`" in markdown
    assert page.count("<th>key bits</th>") == 3
    assert page.count("<details><summary>") == 2
    assert page.count("</details>") == 2
    assert "<summary><code>kivi2</code>: 2-bit keys" in page


def test_the_table_of_all_maps_has_a_row_a_policy_and_layer() -> None:
    table = layer_table([{"policy": name, "layers": rows} for name, rows in MAPS.items()])
    assert table.columns == ["policy", *LAYERS]
    assert table.height == 9
    assert table.filter(policy="kivi2", layer=2)["kl"].item() == pytest.approx(0.002)
    assert table.filter(policy="exact")["kl"].null_count() == 3
    assert table.write_csv().splitlines()[0].startswith("policy,layer,key_bits,value_bits,saved_bytes,key_cosine")


def test_probes_show_each_worst_cell_with_what_the_needles_keep() -> None:
    blocks = told("kivi4", probe_rows(cells_frame()))[1].blocks
    summary, worst = (block for block in blocks if isinstance(block, Table))
    assert [row[:2] for row in summary.rows][::3] == [("int4", "key"), ("kivi2", "key")]
    least = "0.7 in layer 2 at 16–80"
    assert [row[-1] for row in summary.rows] == ["1", "1", least, "1", "1", least]
    assert {len(row) for row in summary.rows} == {len(summary.head)}
    assert {len(row) for row in worst.rows} == {len(worst.head)}
    both = [row for row in worst.rows if row[:2] == ("kivi2", "both")]
    assert [row[-2] for row in both] == ["–", "1 of 2", "–", "0.7 of 2", "1 of 2"]
    assert both[0][3] == "512–1,872"


def test_probes_that_were_not_measured_say_so() -> None:
    assert told("kivi4")[1] == Section("Probes", ["not measured."])
