"""Kinds of events of a run, and the fields of each in `events.jsonl`: read by the reference and by a test of the places that write them."""

from collections.abc import Mapping
from typing import NamedTuple


class EventFields(NamedTuple):
    """One kind of event: a sentence about it and about its step, and field -> sentence. All fields are optional."""

    about: str
    fields: Mapping[str, str]


_PASSED_OVER = {"passed_over": "Reasons for which newer checkpoints were not taken."}
_CHANGED = {"changed": "Settings that differ from the run so far: setting -> old and new value."}
_SECONDS = "Duration, in seconds."

FIELDS: Mapping[str, EventFields] = {
    "start": EventFields(
        "Training starts; the step is the one it starts from.",
        {
            "parameters": "Number of parameters of the model.",
            "devices": "Number of devices.",
            "device_kind": "Kind of the devices, as jax names it.",
            "processes": "Number of processes, one for each host.",
            "total_steps": "Length of the run, in updates.",
            "total_tokens": "Length of the run, in tokens.",
            "folder": "Folder of the run.",
            "version": "Version of maxlm.",
            "mfu_peak": "Number format (bf16, int8 or fp8) that MFU is a share of the peak of.",
            "startup_s": "Time since the command began, in seconds.",
            **_CHANGED,
            "metrics": "Declared metrics: name -> title and unit.",
            "attempt": "Identifier of this attempt of the run.",
            "restarts": "Number of attempts before this one.",
            "extensions": "Packages that the run is extended by: name -> version and digest.",
            "bill": "Price and power of the chips, from which cost and energy are computed.",
            "predicted": "Step time that was predicted for this machine.",
            "elastic": "Where hosts are absent: `absent`, `mesh` and `microbatches` of the smaller run.",
        },
    ),
    "restore": EventFields(
        "The state was restored from a copy of this step.",
        {
            "seconds": _SECONDS,
            **_PASSED_OVER,
            **_CHANGED,
            "source": "Origin of the state: checkpoint, memory, memory of peers, or branch.",
            "branch_of": "Folder of the run that is continued as a branch.",
        },
    ),
    "compile": EventFields(
        "Programs were compiled since the last event of this kind, or since the command began.",
        {
            "programs": "Number of programs.",
            "trace_s": "Time of tracing them, in seconds.",
            "lower_s": "Time of lowering them, in seconds.",
            "compile_s": "Time of compiling them, in seconds.",
            "cache_hits": "Programs that were in the persistent cache.",
            "cache_misses": "Programs that were not in the persistent cache.",
            "longest": "The program that took longest: name, seconds, and whether it was cached.",
        },
    ),
    "save": EventFields(
        "A checkpoint of this step is committed.", {"seconds": _SECONDS, "blocked_s": "Time that the loop waited, in seconds."}
    ),
    "skip": EventFields(
        "The update of this step was not applied.",
        {
            "reason": "Sentence that says why.",
            "cause": "`spike` where loss and gradient are finite, `loss_scale` for an overflow in float16.",
        },
    ),
    "alarm": EventFields(
        "Something needs attention.",
        {
            "reason": "Sentence that says what happened and what to do.",
            "cause": "Kind of the alarm in one word, such as `hang`, `slow_host`, `layer_jump`, `not_finite`, `bad_chunk`.",
            "layer": "Number of the layer that the alarm is about.",
            "tensor": "Tensor in which a value that is not finite was found first.",
            "seconds": "Time without progress, or of the compilation, in seconds.",
            "hosts": "Hosts that are to blame, if they are known.",
            "since": "Step since which a host or a link is slow.",
            "devices": "Ids of the devices that computed wrongly.",
            "certain": "True if these devices are wrong, false if they are suspects.",
        },
    ),
    "eval": EventFields(
        "Held-out documents were evaluated.",
        {
            "eval_loss": "Loss on the held-out documents, in nats a token.",
            "eval_loss/NAME": "Loss on each set of `data.eval`.",
            "eval_loss_ema": "The same losses of an average of the parameters that the run keeps (`ema`), by its name.",
            "eval/METRIC": "Metrics of the section `metrics` on the held-out documents; `eval/METRIC/NAME` on each set of `data.eval`.",
            "eval_ema/METRIC": "The same metrics of an average of the parameters.",
            "seconds": _SECONDS,
        },
    ),
    "tasks": EventFields(
        "Evaluation tasks were run.",
        {"tasks": "Results: task -> metric -> value.", "notes": "Sentences about what was cut off or failed.", "seconds": _SECONDS},
    ),
    "rollback": EventFields(
        "Training went back to the state of this step.",
        {
            "from_step": "Step from which it went back.",
            "reason": "Sentence that says why.",
            "cause": "Kind of the reason in one word, such as `spike`, `bad_loss`, `not_finite` or `layer_jump`.",
            "batches": "Numbers of the batches that are left out from here on.",
            "seconds": _SECONDS,
            **_PASSED_OVER,
        },
    ),
    "preempt": EventFields("A machine or a scheduler asked the run to end.", {"reason": "The signal."}),
    "interrupt": EventFields("A person ended the run by Ctrl-C or by closing the terminal.", {"reason": "The signal."}),
    "killed": EventFields(
        "An attempt ended without `stop`; written by the next attempt, with step and time of the last record.",
        {"goodput": "Division of its time, as far as its last heartbeat tells."},
    ),
    "profile": EventFields(
        "Steps were traced; the step is the one before the first of them.",
        {
            "page": "Path of the page.",
            "attributed": "Share of device time that is attributed to operations.",
            "seconds": "Time for which training paused, in seconds.",
            "reason": "Sentence that says why there is no page, where it failed.",
        },
    ),
    "observer": EventFields(
        "An observer failed, was switched off or writes again.",
        {"name": "Class of the observer.", "reason": "Sentence that says what happened."},
    ),
    "stop": EventFields(
        "Training ended after this step.",
        {
            "reason": "One of done, nothing_left, preempted, interrupted, unhealthy, hung.",
            "message": "Sentence that says why.",
            "goodput": "Division of the run's time into training and losses, in seconds.",
            "eval_loss": "Last loss on held-out documents, in nats a token.",
            "bill": "Cost and energy of the run so far.",
        },
    ),
}
