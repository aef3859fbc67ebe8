# shellcheck shell=bash
# The verbs of maxlm-gcp. Sourced; `main` has read the config and checked the options.

ASSUMED=NONE # state of every machine in a dry run

verb_up() {
  verb_create
  wait_until_up
  verb_log
}

verb_create() {
  local unit found kind api=$API all=()
  mapfile -t all < <(units)
  for kind in $(kinds); do
    API=$kind
    for unit in "${all[@]}"; do
      found=$(describe "$unit")
      [[ $found == NONE* ]] || die "$unit exists already (${found%%,*}): watch it, resume it or delete it, or choose another run.name."
    done
  done
  API=$api
  upload_code
  write_outcome starting
  write_startup
  say "creating ${all[*]}: $HOSTS host(s) of $ACCELERATOR${SPOT:+, spot}; this takes minutes"
  create "${all[@]}"
}

verb_restart() {
  ASSUMED=READY
  [[ $API == gke || -z $IMAGE${SECRETS[*]-} ]] || die "restart leaves the machines' --image and --secret as create has set them: leave them out here."
  check_labels
  upload_code
  write_outcome starting
  if [[ $API == gke ]]; then
    remove "$NAME"
    create "$NAME"
    return
  fi
  on_all_hosts 'sudo bash /var/lib/maxlm/host.sh boot'
}

verb_stop() {
  ASSUMED=READY
  check_labels
  mark stopped
  if [[ $API == gke ]]; then # a suspended JobSet ends its pods, SIGTERM first: jobset.sigs.k8s.io/docs/concepts
    change kubectl patch jobset "$NAME" --type=merge '--patch={"spec":{"suspend":true}}'
    return
  fi
  on_all_hosts 'sudo systemctl stop maxlm'
}

verb_log() {
  if [[ $API == gke ]]; then
    stream kubectl logs --follow --tail=1000 \
      "--selector=jobset.sigs.k8s.io/jobset-name=$NAME,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
  else
    on_host "$(nodes | head -n 1)" 0 'tail -n 1000 -F /var/log/maxlm.log'
  fi
}

# Recreates dead or missing machines; each starts the run by itself, which continues from its last checkpoint, with the code in the
# bucket. Of several VMs the live ones stay: `maxlm launch` waits there for the others.
verb_resume() {
  local unit found state run owner again=()
  ASSUMED=PREEMPTED
  for unit in $(units); do
    found=$(describe "$unit")
    IFS=, read -r state run owner <<<"$found"
    case $(phase_of "$state") in
      dead)
        check_label "$unit" "$run" "$owner"
        again+=("$unit")
        remove "$unit"
        ;;
      none) again+=("$unit") ;;
    esac
  done
  ((${#again[@]})) || { say "nothing to resume: $(state_summary)"; return 0; }
  write_outcome starting
  write_startup
  say "creating ${again[*]} again"
  create "${again[@]}"
}

verb_fetch() {
  local to=${TO:-runs/$RUN}
  [[ -n $DRY_RUN ]] || mkdir -p "$to"
  change gcloud storage rsync "$BUCKET/$RUN/run" "$to" --recursive
  say "$RUN is in $to; its checkpoints stay in the bucket"
}

# All labels are read before the first is deleted. Deletes also what other options, or an earlier topology of the config, have made: TPUs with
# --queued or without (the queue first, since a request takes its nodes along), and further GPU VMs with this run's labels.
verb_delete() {
  local unit found api=$API kind there=()
  for kind in $(kinds); do
    API=$kind ASSUMED=NONE # in a dry run: only what these options would make
    [[ $kind != "$api" ]] || ASSUMED=READY
    check_labels
    for unit in $(units); do
      found=$(describe "$unit")
      [[ $found == NONE* ]] || there+=("$kind $unit")
    done
  done
  if [[ $API == gce ]]; then
    found=$(labelled)
    for unit in $found; do
      [[ " ${there[*]} " == *" $unit "* ]] || there+=("gce $unit")
    done
  fi
  mark deleted
  ((${#there[@]})) || say "$NAME has no machine"
  for unit in "${there[@]}"; do
    API=${unit% *} unit=${unit#* } ASSUMED=READY
    found=$(describe "$unit")
    [[ $found == NONE* ]] || remove "$unit"
  done
  say "checkpoints and the run directory stay at $BUCKET/$RUN"
}

check_labels() {
  local unit found state run owner
  for unit in $(units); do
    found=$(describe "$unit")
    IFS=, read -r state run owner <<<"$found"
    [[ $state == NONE ]] || check_label "$unit" "$run" "$owner"
  done
}

on_all_hosts() { # a command on all hosts of all nodes, at the same time: a run that is stopped on some waits for the others
  local node pid code=0 pids=()
  for node in $(nodes); do
    on_host "$node" all "$1" &
    pids+=("$!")
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=1; done
  return "$code"
}

wait_until_up() {
  local line
  ASSUMED=READY
  while true; do
    line=$(state_summary)
    case $line in
      *dead* | *none*) die "$NAME is $line: maxlm-gcp resume creates it again." ;;
      *waiting*) say "$line: waiting" ;;
      *) return 0 ;;
    esac
    sleep "$EVERY"
  done
}

# Uploads what the hosts fetch: the resolved config, a shared secret and, unless a container holds it, the code: git's HEAD, or the package
# that is installed here.
upload_code() {
  if [[ -z $IMAGE ]]; then
    local changed
    if [[ -z $CLONE ]]; then
      "$PYTHON" "$HERE/repack.py" "$WORK/code.tar.gz" || exit 2
    else
      changed=$(git -C "$CLONE" status --porcelain -- maxlm kernels gcp pyproject.toml) ||
        die "$CLONE is no git repository, and the hosts run git's HEAD: clone maxlm with git, or give --image IMAGE."
      [[ -z $changed ]] || die "uncommitted changes would stay here, since the hosts run git's HEAD: commit them (${changed%%$'\n'*} ...)."
      git -C "$CLONE" archive --format=tar.gz --output="$WORK/code.tar.gz" HEAD
    fi
    change gcloud storage cp "$WORK/code.tar.gz" "$BUCKET/$RUN/code.tar.gz"
  fi
  change gcloud storage cp "$WORK/config.yml" "$BUCKET/$RUN/config.yml"
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$WORK/cluster-secret"
  change gcloud storage cp "$WORK/cluster-secret" "$BUCKET/$RUN/cluster-secret"
}

write_outcome() { # of every new start: or `watch` would report that of an earlier one
  echo "$1" >"$WORK/outcome"
  change gcloud storage cp "$WORK/outcome" "$BUCKET/$RUN/outcome"
}

# Tells `watch --resume`, before any machine is gone, that it must create none again. An end that the run has told itself stays.
mark() {
  (
    outcome=$(optional gcloud storage cat "$BUCKET/$RUN/outcome") || exit 1
    [[ ! ${outcome//[!0-9]/} =~ ^3?$ ]] || write_outcome "$1"
  ) || say "the bucket does not say that $RUN is $1: end every watch --resume of it yourself"
}

# The startup script of a VM: its settings, then host.sh. It holds names of secrets and no secret.
write_startup() {
  local cluster='' extra=tpu name
  [[ $KIND == tpu ]] || extra=cuda
  [[ $API != gce || $UNITS -eq 1 ]] || cluster="coordinator=$NAME-0:8476 process_count=$UNITS process_id=HOST_NUMBER"
  local -A settings=([BUCKET]=$BUCKET [RUN]=$RUN [EXTRA]=$extra [IMAGE]=$IMAGE [RESTARTS]=$RESTARTS [CLUSTER]=$cluster [SECRETS]="${SECRETS[*]-}" [EXTENSIONS]="${EXTENSIONS[*]-}")
  {
    echo '#!/usr/bin/env bash'
    for name in BUCKET RUN EXTRA IMAGE RESTARTS CLUSTER SECRETS EXTENSIONS; do printf 'export %s=%q\n' "$name" "${settings[$name]}"; done
    cat "$HERE/host.sh"
  } >"$WORK/startup.sh"
}
