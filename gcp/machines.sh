# shellcheck shell=bash
# Machines by the API that provides them: API is tpu (Cloud TPU VMs), queued (the same, through a queue; all slices of several), gce (GPU VMs)
# or gke (a JobSet). Sourced by maxlm-gcp, whose variables these functions read. Flags: docs.cloud.google.com/sdk/gcloud/reference.

units() { # names of the objects to create and delete
  if [[ $API == gce ]]; then numbered; else echo "$NAME"; fi
}

kinds() { # APIs under which a machine of this run may exist
  case $API in
    tpu | queued) printf '%s\n' queued tpu ;;
    *) echo "$API" ;;
  esac
}

labelled() { # names of all GPU VMs of this run in the zone
  query gcloud compute instances list ${PROJECT:+"--project=$PROJECT"} "--zones=$ZONE" \
    "--filter=labels.maxlm-run=$NAME AND labels.maxlm-owner=$OWNER" "--format=value(name)"
}

nodes() { # names of the nodes, which have hosts
  if [[ $API == queued && $UNITS -gt 1 ]]; then numbered; else units; fi
}

numbered() { seq -f "$NAME-%.0f" 0 $((UNITS - 1)); }

# `STATE,RUN,OWNER` of a unit, or NONE; the labels of a queued resource are those of its nodes. A dry run uses ASSUMED.
describe() {
  local labels='labels.maxlm-run,labels.maxlm-owner' found=''
  case $API in
    tpu) found=$(query gcloud compute tpus tpu-vm describe "$1" "${PLACE[@]}" --format="csv[no-heading](state,$labels)") ;;
    queued)
      labels="state.state,${labels//labels./tpu.nodeSpec[0].node.labels.}"
      found=$(query gcloud compute tpus queued-resources describe "$1" "${PLACE[@]}" --format="csv[no-heading]($labels)")
      ;;
    gce) found=$(query gcloud compute instances describe "$1" "${PLACE[@]}" --format="csv[no-heading](status,$labels)") ;;
    gke)
      local path='{.status.terminalState}{.spec.suspend},{.metadata.labels.maxlm-run},{.metadata.labels.maxlm-owner}'
      found=$(query kubectl get jobset "$1" --output="jsonpath=$path") || { (($? == 4)) || exit 1; } # here: the lines below return 0
      found=${found/#true,/SUSPENDED,} found=${found/#false,/,}
      found=${found/#Failedfalse,/Failed,} found=${found/#Completedfalse,/Completed,}
      [[ $found != ,* ]] || found="RUNNING$found" # no terminal state yet
      ;;
  esac || { (($? == 4)) || exit 1; }
  [[ -z $DRY_RUN ]] || found="$ASSUMED,$NAME,$OWNER"
  echo "${found:-NONE}"
}

phase_of() { # up, waiting, dead or none, from a state of any API
  case $1 in
    NONE) echo none ;;
    READY | ACTIVE | RUNNING | Completed) echo up ;;
    PREEMPTED | TERMINATED | STOPPED | STOPPING | SUSPENDED | SUSPENDING | FAILED | Failed) echo dead ;;
    *) echo waiting ;;
  esac
}

create() { # the units named
  local labels="maxlm-run=$NAME,maxlm-owner=$OWNER" hardware
  local common=("${PLACE[@]}" --labels="$labels" --metadata-from-file="startup-script=$WORK/startup.sh" --scopes=cloud-platform "${ACCOUNT[@]}")
  case $API in
    tpu)
      change gcloud compute tpus tpu-vm create "$1" "${common[@]}" "${LINKS[@]}" \
        --accelerator-type="$ACCELERATOR" --version="$IMAGE_FAMILY" ${SPOT:+--spot} ${RESERVED:+--reserved}
      ;;
    queued)
      hardware=(--node-id="$NAME")
      ((UNITS > 1)) && hardware=(--node-count="$UNITS" --node-prefix="$NAME")
      change gcloud compute tpus queued-resources create "$1" "${common[@]}" "${LINKS[@]}" "${hardware[@]}" \
        --accelerator-type="$ACCELERATOR" --runtime-version="$IMAGE_FAMILY" --async ${SPOT:+--spot} ${RESERVED:+--reserved}
      ;;
    gce)
      # GPU VMs cannot move to another machine while they run: docs.cloud.google.com/compute/docs/gpus/gpu-host-maintenance
      hardware=(--machine-type="$ACCELERATOR" --image-family="$IMAGE_FAMILY" --image-project=ubuntu-os-accelerator-images
        --boot-disk-size=200GB --boot-disk-type=hyperdisk-balanced --maintenance-policy=TERMINATE)
      [[ -z $SPOT ]] || hardware+=(--provisioning-model=SPOT --instance-termination-action=STOP)
      [[ -z $RESERVATION ]] || hardware+=(--reservation-affinity=specific --reservation="$RESERVATION")
      (change gcloud compute instances create "$@" "${common[@]}" "${hardware[@]}" "${LINKS[@]}") || { tell_made "$@"; exit 1; }
      ;;
    gke)
      render_jobset >"$WORK/jobset.yaml"
      [[ -z $DRY_RUN ]] || cat "$WORK/jobset.yaml"
      change kubectl apply --filename="$WORK/jobset.yaml"
      ;;
  esac
}

tell_made() { # which of the VMs named exist after a `create` that has failed: it may have made some of them
  local unit found made=()
  for unit in "$@"; do
    found=$(describe "$unit") || { say "see with watch which VMs exist, since they cost: delete removes them"; return; }
    [[ $found == NONE* ]] || made+=("$unit")
  done
  ((${#made[@]} == 0)) || say "${made[*]} exist and cost: maxlm-gcp resume creates the others, maxlm-gcp delete removes these (before another --zone)"
}

remove() { # one unit, whose labels have been read
  case $API in
    tpu) change gcloud compute tpus tpu-vm delete "$1" "${PLACE[@]}" --quiet ;;
    queued) change gcloud compute tpus queued-resources delete "$1" "${PLACE[@]}" --force --quiet ;; # --force: its nodes, too
    gce) change gcloud compute instances delete "$1" "${PLACE[@]}" --quiet ;;
    gke) change kubectl delete jobset "$1" --wait=true ;;
  esac
}

on_host() { # NODE WORKER COMMAND: over ssh; WORKER is a number or `all`
  if [[ $API == gce ]]; then
    stream gcloud compute ssh "$1" "${PLACE[@]}" --command="$3"
  else
    stream gcloud compute tpus tpu-vm ssh "$1" "${PLACE[@]}" --worker="$2" --command="$3"
  fi
}

render_jobset() { # jobset.yaml for this kind of machine: a line that ends in `# only: WORD` is for WORD, and ${NAMES} are filled in
  local kinds=$KIND${SPOT:+|spot} slices=1
  [[ $KIND != tpu ]] || slices=$UNITS
  sed -E "s/  # only: ($kinds)\$//; /  # only: /d" "$HERE/jobset.yaml" |
    NAME=$NAME OWNER=$OWNER IMAGE=$IMAGE BUCKET=$BUCKET RUN=$RUN RESTARTS=$RESTARTS SECRETS="${SECRETS[*]-}" EXTENSIONS="${EXTENSIONS[*]-}" ACCOUNT=${SERVICE_ACCOUNT:-default} \
      SLICES=$slices HOSTS=$HOSTS HOSTS_A_SLICE=$((HOSTS / slices)) ACCELERATOR=$GKE_ACCELERATOR TOPOLOGY=$TOPOLOGY CHIPS=$CHIPS_A_HOST \
      "$PYTHON" -c 'import os, string, sys; sys.stdout.write(string.Template(sys.stdin.read()).substitute(os.environ))'
}
