"""The scalars TensorBoard would show, read back from its files."""

from tensorboardX.proto.event_pb2 import Event as TfEvent

from maxlm.telemetry.observer import Event
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tensorboard import TensorBoardObserver


def shown(folder):
    """(name, step) -> value as TensorBoard keeps them: a session that starts at step k forgets steps >= k of earlier files."""
    values = {}
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):  # TFRecord: length (8), its checksum (4), the message, its checksum (4)
            length = int.from_bytes(data[at : at + 8], "little")
            event = TfEvent.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.HasField("session_log"):
                values = {key: value for key, value in values.items() if key[1] < event.step}
            for value in event.summary.value:
                values[value.tag, event.step] = value.simple_value
    return values


def test_figures_become_scalars_and_unknown_ones_are_left_out(tmp_path, record):
    board = TensorBoardObserver(RunDirectory(tmp_path, primary=True))
    board.on_step(record(5, loss=2.5, extra={"z_loss": 0.5}))
    board.on_event(Event("eval", 5, data={"eval_loss": 2.75}))
    board.on_event(Event("save", 5, data={"seconds": 1.0}))
    board.close()
    values = shown(tmp_path / "tensorboard")
    assert values["loss", 5] == 2.5
    assert values["z_loss", 5] == 0.5
    assert values["eval_loss", 5] == 2.75
    assert "mfu" not in {name for name, _ in values}
    assert "seconds" not in {name for name, _ in values}


def test_a_restart_hides_what_the_killed_attempt_wrote(tmp_path, record):
    first = TensorBoardObserver(RunDirectory(tmp_path, primary=True))
    for step in range(1, 9):
        first.on_step(record(step, loss=1.0))
    first.close()
    again = TensorBoardObserver(RunDirectory(tmp_path, primary=True))
    for step in range(4, 7):
        again.on_step(record(step, loss=2.0))
    again.close()
    assert {step: value for (name, step), value in shown(tmp_path / "tensorboard").items() if name == "loss"} == {
        1: 1,
        2: 1,
        3: 1,
        4: 2,
        5: 2,
        6: 2,
    }


def test_nothing_is_written_before_the_first_record(tmp_path):
    TensorBoardObserver(RunDirectory(tmp_path, primary=True)).close()
    assert list(tmp_path.iterdir()) == []


def test_a_rollback_in_one_process_hides_the_steps_undone(tmp_path, record):
    board = TensorBoardObserver(RunDirectory(tmp_path, primary=True))
    for step, loss in ((1, 1.0), (2, 1.0), (3, 1.0), (2, 2.0)):
        board.on_step(record(step, loss=loss))
    board.close()
    assert {step: value for (name, step), value in shown(tmp_path / "tensorboard").items() if name == "loss"} == {1: 1, 2: 2}
