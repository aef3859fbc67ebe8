#!/usr/bin/env bash
# Runs on every host. `boot` is the startup script of a VM: it starts `run` as a service and exits. `run` fetches and installs the code, and
# continues with `train`; a container, where all is installed, starts with `train`. Settings are variables, which maxlm-gcp prepends to this
# script (VMs) or puts into the manifest (GKE). Secrets are read here, into the environment of the run, and nowhere else.
#
#   BUCKET RUN      gs://NAME, and the run's name: persistent files are under $BUCKET/$RUN
#   EXTRA           tpu or cuda: the extra of maxlm to install
#   IMAGE           a container to run instead of the code in the bucket; empty: none
#   RESTARTS        of `maxlm launch`
#   CLUSTER         key=value words for a cluster that maxlm does not detect by itself; HOST_NUMBER stands for the number in the VM's name
#   SECRETS         VARIABLE=NAME words: names of secrets in Secret Manager. EXTENSIONS: modules in IMAGE for `maxlm --extension`
set -euo pipefail
umask 022

export HOME=${HOME:-/root} PATH=$PATH:/snap/bin # a service has neither, and Ubuntu's gcloud is a snap
HOME_DIR=${MAXLM_HOME:-/var/lib/maxlm} LOG=${MAXLM_LOG:-/var/log/maxlm.log}
SYNC_SECONDS=${SYNC_SECONDS:-60} RETRY_SECONDS=${RETRY_SECONDS:-20}
SERVICE=maxlm
SAVE_SECONDS=300 # between SIGTERM and SIGKILL, for the last save; a preempted machine gives less
export MAXLM_GRACE_SECONDS=${MAXLM_GRACE_SECONDS:-$((SAVE_SECONDS - 30))} # the run exits before that

STARTED='' SIGNALED='' # set once `maxlm` runs, which reports its own end; and once SIGTERM or SIGINT has come

note() { printf 'host %s: %s\n' "$(hostname)" "$*"; }

boot() {
  mkdir -p "$HOME_DIR"
  [[ $0 -ef $HOME_DIR/host.sh ]] || install -m 755 "$0" "$HOME_DIR/host.sh" # `restart` starts it from there
  systemctl stop "$SERVICE" 2>/dev/null || true # a run from an earlier boot: it saves and exits
  # After: what a save still needs ends after it when the machine shuts down. docs: systemd.unit(5)
  # KillMode=mixed: SIGTERM goes to this script alone, which hands it on once. docs: systemd.kill(5)
  systemd-run --unit="$SERVICE" --collect --property="After=network-online.target docker.service snapd.service" \
    --property=LimitNOFILE=1048576 --property=KillMode=mixed --property="TimeoutStopSec=$SAVE_SECONDS" \
    --property="StandardOutput=append:$LOG" --property="StandardError=append:$LOG" bash "$HOME_DIR/host.sh" run
}

run() {
  cd "$HOME_DIR"
  if [[ -n ${IMAGE:-} ]]; then
    run_container
  else
    install_code
    train
  fi
}

report_early_exit() { # of a host that failed before training: all others wait for it
  [[ $1 != 0 && -z $STARTED ]] || return 0
  note "ended with $1 before the run began"
  touch "$HOME_DIR/told" || true
  [[ ! -f $LOG ]] || gcloud storage cp "$LOG" "$BUCKET/$RUN/logs/$(hostname -s).log" >/dev/null 2>&1 || true
  tell_outcome "$1" || true
}

outcome() { gcloud storage cat "$BUCKET/$RUN/outcome" 2>/dev/null || true; }

tell_outcome() { # to `watch`; that a signal has ended the run is no news after `stop` and `delete`, which have written so
  [[ $1 =~ ^(3|130|137|143)$ && $(outcome) =~ ^(stopped|deleted)$ ]] || echo "$1" | gcloud storage cp - "$BUCKET/$RUN/outcome"
}

retry() { # a command that one fault of a network would fail: three tries
  local try code
  for try in 1 2 3; do
    if "$@"; then return 0; else code=$?; fi
    note "try $try of 3 ended with $code: ${*:1:5} ..."
    ((try == 3)) || sleep "$RETRY_SECONDS"
  done
  return "$code"
}

install_code() {
  note "fetching $BUCKET/$RUN/code.tar.gz"
  rm -rf code && mkdir code
  retry gcloud storage cp "$BUCKET/$RUN/code.tar.gz" code.tar.gz
  tar -xzf code.tar.gz -C code
  [[ -d venv ]] || make_venv
  local source=(--editable "code[$EXTRA]") wheels=(code/maxlm-*.whl) # git's HEAD; or an installed package, perhaps of the version that is here
  [[ ! -f ${wheels[0]} ]] || { venv/bin/python -m pip uninstall --quiet --yes maxlm; source=("${wheels[0]}[$EXTRA]"); }
  note "installing maxlm[$EXTRA]"
  retry venv/bin/python -m pip install --quiet --disable-pip-version-check "${source[@]}"
}

make_venv() {
  local fit='import sys, ensurepip; sys.exit(sys.version_info < (3, 11))'
  if ! python3 -c "$fit" 2>/dev/null; then # Ubuntu's Python has no ensurepip
    retry apt-get -o DPkg::Lock::Timeout=300 update --quiet
    retry apt-get -o DPkg::Lock::Timeout=300 install --quiet --yes python3-venv
  fi
  if python3 -c "$fit" 2>/dev/null; then
    python3 -m venv venv
  else # Ubuntu 22.04, which TPU VMs have, is at 3.10: docs.astral.sh/uv/guides/install-python
    note "this machine's Python is older than 3.11: uv brings one"
    python3 -m venv uv
    retry uv/bin/python -m pip install --quiet --disable-pip-version-check uv
    retry uv/bin/uv venv --quiet --seed --python 3.12 venv
  fi
}

run_container() {
  local code=0 devices=(--privileged) # TPUs are device files that only such a container sees: docs.cloud.google.com/tpu/docs/run-in-container
  [[ $EXTRA == tpu ]] || devices=(--gpus all --ipc=host)
  command -v docker >/dev/null || { note "IMAGE is set and this machine has no docker"; exit 2; }
  case $IMAGE in *.pkg.dev/*) gcloud auth configure-docker "${IMAGE%%/*}" --quiet ;; esac
  docker rm --force "$SERVICE" >/dev/null 2>&1 || true
  docker image inspect "$IMAGE" >/dev/null 2>&1 || retry docker pull --quiet "$IMAGE"
  rm -f "$HOME_DIR/told"
  STARTED=1
  docker run --rm --name "$SERVICE" --stop-timeout="$SAVE_SECONDS" --network=host "${devices[@]}" --volume="$HOME_DIR:$HOME_DIR" --volume="$LOG:$LOG" --workdir="$HOME_DIR" \
    --env=BUCKET --env=RUN --env=EXTRA --env=RESTARTS --env=CLUSTER --env=SECRETS --env=EXTENSIONS "$IMAGE" bash /opt/maxlm/gcp/host.sh train &
  forward_signals "$!" || code=$?
  # 125 to 127: docker could not run it; 137: it was killed, by the kernel for its memory if not after a signal to this script.
  if [[ $code =~ ^(125|126|127|137)$ && -z $SIGNALED && ! -e $HOME_DIR/told ]]; then
    note "docker run ended with $code, and the container has not reported anything"
    STARTED=
  fi
  return "$code"
}

train() {
  local python=${MAXLM_PYTHON:-venv/bin/python} words=() extensions=() first number now here="$BUCKET/$RUN"
  mkdir -p "$HOME_DIR"
  cd "$HOME_DIR"
  number=$(hostname -s)
  read -ra words <<<"${CLUSTER:-}" && read -ra extensions <<<"${EXTENSIONS:-}"
  words=("${words[@]//HOST_NUMBER/${number##*-}}")
  retry gcloud storage cp "$here/config.yml" config.yml
  read_secrets
  first=$(is_process_0 "$python" "${words[@]}")
  if [[ $first == yes ]]; then
    # Restore what an earlier machine wrote, so that metrics and events continue. If that fails, nothing starts: new files would
    # overwrite it.
    if [[ ! -d runs/$RUN ]] && is_there "$here/run/events.jsonl"; then
      rm -rf runs/.back && mkdir -p runs/.back
      gcloud storage rsync "$here/run" runs/.back --recursive
      mv runs/.back "runs/$RUN" # all of it, or nothing
    fi
    # `deleted` stays, and the failure of another host. On GKE (a pod has an index) it is of an earlier start: the JobSet starts all again.
    now=$(outcome)
    [[ $now == deleted || ($now =~ ^[0-9]+$ && $now != 3 && -z ${JOB_COMPLETION_INDEX:-}) ]] || echo "running" | gcloud storage cp - "$here/outcome"
  fi
  sync_loop "$first" &
  local sender=$! code=0
  note "maxlm train config.yml ${words[*]-}"
  STARTED=1
  "$python" -m maxlm launch --restarts "$RESTARTS" -- train config.yml "${extensions[@]/#/--extension=}" "${words[@]}" &
  forward_signals "$!" || code=$?
  kill "$sender" 2>/dev/null || true
  wait "$sender" || true
  copy_to_bucket "$first" || note "the last copy to the bucket failed"
  [[ $first != yes ]] || tell_outcome "$code"
  touch told # to the script outside of a container
  note "ended with $code"
  return "$code"
}

is_there() { # an object of the bucket; an error that leaves it open ends the script
  local said
  ! said=$(gcloud storage ls "$1" 2>&1) || return 0
  ! grep -qiE 'NOT_FOUND|was not found|not find|matched no objects' <<<"$said" || return 1
  note "whether $1 exists cannot be seen, so nothing starts: $said"
  exit 1
}

read_secrets() {
  local pair value
  for pair in ${SECRETS:-}; do
    value=$(gcloud secrets versions access latest --secret="${pair#*=}") # its own line: an error must end the script
    export "${pair%%=*}=$value"
  done
  # The hosts of a run share it, so that no stranger takes part (docs/how-to/many-hosts.md).
  MAXLM_CLUSTER_SECRET=${MAXLM_CLUSTER_SECRET:-$(gcloud storage cat "$BUCKET/$RUN/cluster-secret")}
  export MAXLM_CLUSTER_SECRET
}

# True if this process will write the run directory: only its machine may update the bucket's copy.
is_process_0() {
  "$1" - "${@:2}" <<'PYTHON'
import os, sys
from maxlm.cluster import environment
named, _ = environment.split_arguments(sys.argv[1:])
metadata = (lambda name: None) if os.environ.get("EXTRA") != "tpu" or "TPU_SKIP_MDS_QUERY" in os.environ else environment.metadata
spec = environment.find(named, os.environ, metadata, 0)
print("yes" if spec is None or spec.process == 0 else "no")
PYTHON
}

copy_to_bucket() { # the run directory, if this is process 0, and the log
  local here="$BUCKET/$RUN"
  if [[ $1 == yes && -d runs/$RUN ]]; then
    gcloud storage rsync "runs/$RUN" "$here/run" --recursive >/dev/null 2>&1 || return 1
    # `watch` reads only the last lines.
    [[ ! -f runs/$RUN/metrics.jsonl ]] || tail -n 20 "runs/$RUN/metrics.jsonl" | gcloud storage cp - "$here/latest.jsonl" 2>/dev/null || return 1
  fi
  [[ ! -f $LOG ]] || gcloud storage cp "$LOG" "$here/logs/$(hostname -s).log" >/dev/null 2>&1
}

sync_loop() {
  trap 'kill "$(jobs -p)" 2>/dev/null; exit 0' TERM
  while true; do
    sleep "$SYNC_SECONDS" &
    wait "$!"
    copy_to_bucket "$1" || note "a copy to the bucket failed; it is tried again in $SYNC_SECONDS s"
  done
}

# Waits for the process, forwards SIGTERM and SIGINT to it, and returns its exit code. A signal interrupts `wait`, which is repeated.
forward_signals() {
  local code=0 interrupted=1
  # shellcheck disable=SC2064 # expand the process id now
  trap "interrupted=1; SIGNALED=1; kill -TERM $1 2>/dev/null" TERM INT
  while [[ -n $interrupted ]]; do
    interrupted='' code=0
    wait "$1" || code=$?
  done
  trap - TERM INT
  return "$code"
}

[[ ${1:-boot} == boot ]] || trap 'report_early_exit "$?"' EXIT
"${1:-boot}"
