from dflash.training.curves import CURVES, draw_curves, thinned
from dflash.training.loop import train
from tasks.stage import plots_of
from tests.training.small import LENGTHS, make_config, make_states


def test_a_training_leaves_its_curves_as_png_and_svg(home):
    artifact = train(make_config(), make_states(LENGTHS))
    names = {path.name for path in (artifact.path / "plots").iterdir()}
    assert names == {f"{curves.name}.{kind}" for curves in CURVES for kind in ("png", "svg")}
    for name, said in (("loss", "Loss"), ("acceptance_length", "tree4"), ("accuracy", "top8_accuracy")):
        assert said in (artifact.path / "plots" / f"{name}.svg").read_text()
    assert plots_of(artifact).count("](data:image/svg+xml;base64,") == len(CURVES)
    assert "maths" not in (artifact.path / "plots" / "acceptance_length.svg").read_text()


def test_what_was_not_measured_is_not_drawn(tmp_path):
    rows = [{"train/step": step, "train/loss": 1.0} for step in (1, 2)]
    assert draw_curves(rows, tmp_path) == ["loss"]
    assert draw_curves([], tmp_path) == []


def test_long_lines_keep_their_ends():
    points = [(float(step), 1.0) for step in range(1, 7778)]
    assert len(thinned(points)) <= 501
    assert (thinned(points)[0], thinned(points)[-1]) == (points[0], points[-1])
    assert thinned(points[:20]) == points[:20]
