"""Small runs are started by tools, too, where no test has prepared the environment."""

from small_run import environment


def test_a_tool_needs_nothing_in_the_environment(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    assert environment(3)["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"
