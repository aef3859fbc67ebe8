# shellcheck shell=bash
# How the run is, and making again what is gone. Sourced by maxlm-gcp.

# The bucket says how far the run is, also when no machine is alive. The first look must succeed; a later one that fails, or a machine that
# cannot be made again, is tried again: a run takes weeks.
verb_watch() {
  local code first=1
  set +e # and not `look || ...`, within which no error would end anything
  while true; do
    look
    code=$?
    if ((code == 9)) && [[ -n $first ]]; then return 1; fi
    if [[ -n $ONCE$DRY_RUN || -f $WORK/ended ]]; then return "$code"; fi
    first=
    sleep "$EVERY"
  done
}

# A line of `watch`, and what is to be done about it. Returns the run's exit code and leaves the file `ended` if that is its end; 9
# if it could not look, 1 if it could not make again what is dead.
look() {
  local line outcome code
  line=$(states) || return 9
  outcome=$(optional gcloud storage cat "$BUCKET/$RUN/outcome") || return 9
  (optional gcloud storage cat "$BUCKET/$RUN/latest.jsonl") >"$WORK/latest.jsonl" || return 9
  (optional gcloud storage cat "$BUCKET/$RUN/run/events.jsonl") >"$WORK/events.jsonl" || return 9
  printf '%s  %s  %s\n' "$(date +%H:%M:%S)" "$line" "$("$PYTHON" "$HERE/progress.py" "$WORK/latest.jsonl" "$WORK/events.jsonl")"
  code=${outcome//[!0-9]/}
  case $code in
    '' | 3) ;; # it runs, or was saved and stopped: by you, or because its machines are taken
    0) say "$RUN is done: fetch it, and delete the machines" ;;
    2) say "$RUN ended with 2, its input is wrong: see the log" ;;
    4) say "$RUN ended with 4, training is unhealthy: see the log" ;;
    *) say "$RUN ended with $code: a host could not begin, or its restarts are used up; see the log; restart starts it again" ;;
  esac
  [[ $code == '' || $code == 3 ]] || { touch "$WORK/ended"; return "$code"; }
  # None is left where an earlier try has deleted what was dead, and found no room for the new: the run has begun, so it is made again.
  if [[ -n $AGAIN && ($line == *dead* || ($line == *none* && -n $outcome)) ]]; then
    (set -e; verb_resume)
  fi
}

optional() { # `ask`, where nothing need be there
  ask "$@" || { (($? == 4)) || return 1; }
}

states() { # of all machines: `READY (up)`, or `RUNNING (up), TERMINATED (dead)`
  local unit found told=()
  for unit in $(units); do
    found=$(describe "$unit") || return 1
    told+=("${found%%,*} ($(life "${found%%,*}"))")
  done
  printf '%s\n' "${told[@]}" | sort -u | paste -sd, - | sed 's/,/, /g'
}
