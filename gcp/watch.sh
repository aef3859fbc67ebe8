# shellcheck shell=bash
# State of the run, and recreation of lost machines. Sourced by maxlm-gcp.

# Progress is read from the bucket, also when no machine is alive. The first poll must succeed; later failures, also to recreate a machine,
# are retried: a run takes weeks.
verb_watch() {
  local code first=1
  set +e # and not `poll_once || ...`, within which no error would end anything
  while true; do
    poll_once
    code=$?
    if ((code == 9)) && [[ -n $first ]]; then return 1; fi
    if [[ -n $ONCE$DRY_RUN || -f $WORK/ended ]]; then return "$code"; fi
    first=
    sleep "$EVERY"
  done
}

# Prints a line, and resumes dead machines if asked to. Returns the run's exit code (3 after `stop` and `delete`), with the file `ended`, at
# its end; 9 if polling failed, 1 if recreation failed.
poll_once() {
  local line outcome code name
  line=$(state_summary) || return 9
  outcome=$(optional gcloud storage cat "$BUCKET/$RUN/outcome") || return 9
  mkdir -p "$WORK/run"
  (optional gcloud storage cat "$BUCKET/$RUN/latest.jsonl") >"$WORK/run/metrics.jsonl" || return 9
  for name in events.jsonl heartbeat.json supervisor.jsonl unhealthy_hosts.json; do
    (optional gcloud storage cat "$BUCKET/$RUN/run/$name") >"$WORK/run/$name" || return 9
  done
  printf '%s  %s  %s\n' "$(date +%H:%M:%S)" "$line" "$("$PYTHON" "$HERE/progress.py" "$WORK/run")"
  code=${outcome//[!0-9]/}
  case $outcome in
    deleted) say "delete has been called for $RUN, so its machines are not created again: create goes on from its last checkpoint" ;;
    stopped) say "stop has been called for $RUN, so it is not resumed: restart goes on from its last checkpoint" ;;
  esac
  [[ $outcome != deleted && $outcome != stopped ]] || { touch "$WORK/ended"; return 3; }
  case $code in
    '' | 3) ;; # it runs, or was saved and stopped because its machines are taken
    0) say "$RUN is done: fetch it, and delete the machines" ;;
    2) say "$RUN ended with 2, its input is wrong: see the log" ;;
    4) say "$RUN ended with 4, training is unhealthy: see the log" ;;
    *) say "$RUN ended with $code: a host could not begin, or its restarts are used up; see the log; restart starts it again" ;;
  esac
  [[ $code == '' || $code == 3 ]] || { touch "$WORK/ended"; return "$code"; }
  # None is left where an earlier try deleted the dead machines and found no capacity for new ones: recreate those too.
  if [[ -n $RESUME && ($line == *dead* || ($line == *none* && -n $outcome)) ]]; then
    (set -e; verb_resume)
  fi
}

optional() { # `query` of an object that may not exist
  query "$@" || { (($? == 4)) || return 1; }
}

state_summary() { # of all machines: `READY (up)`, or `RUNNING (up), TERMINATED (dead)`
  local unit found told=()
  for unit in $(units); do
    found=$(describe "$unit") || return 1
    told+=("${found%%,*} ($(phase_of "${found%%,*}"))")
  done
  printf '%s\n' "${told[@]}" | sort -u | paste -sd, - | sed 's/,/, /g'
}
