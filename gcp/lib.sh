# shellcheck shell=bash
# Messages, commands and their errors, shared by all verbs of maxlm-gcp. Sourced.
# Uses DRY_RUN (empty: no), WORK (a scratch folder), RUN and OWNER. Commands are shown on file descriptor 3.

say() { printf 'maxlm-gcp: %s\n' "$*" >&2; }

die() { # wrong input: one line, and maxlm's exit code for it
  say "$*"
  exit 2
}

show() { # a command as it could be typed
  local words
  printf -v words '%q ' "$@"
  printf '+ %s\n' "${words% }" >&3
}

# Runs a command with its stderr in a file; does nothing in a dry run.
attempt() {
  show "$@"
  : >"$WORK/errors"
  [[ -n $DRY_RUN ]] || "$@" 2>"$WORK/errors"
}

# Runs a command that changes something. Its stderr is printed once it has ended, after an explanation if it failed.
change() {
  attempt "$@" || refused "$@"
  [[ ! -s $WORK/errors ]] || cat "$WORK/errors" >&2
}

# Runs a read-only command: prints its output, or returns 4 if the object does not exist. Any other error exits.
query() {
  attempt "$@" || {
    grep -qiE 'NOT_FOUND|was not found|\(NotFound\)|not find|matched no objects' "$WORK/errors" || refused "$@"
    return 4
  }
}

# Runs a long or interactive command with its output unbuffered.
stream() {
  show "$@"
  [[ -z $DRY_RUN ]] || return 0
  local code=0
  "$@" || code=$?
  ((code == 0)) || { say "ended with $code: ${*:1:6} ..."; exit 1; }
}

refused() { # an explanation in a line, and then the original
  say "$(explain "$(cat "$WORK/errors")"); it was: ${*:1:5} ..."
  sed 's/^/  | /' "$WORK/errors" >&2
  exit 1
}

# Explains an error of gcloud or kubectl: what was refused, where, and the fix.
explain() {
  local text=$1 where=''
  local quota="Quota (limit )?'([^']+)'" limit='[Ll]imit:? *([0-9.]+)( in (zone|region) ([a-z0-9-]+)|,? globally)?'
  local permission="([Rr]equired|[Pp]ermission) '([a-zA-Z.]+)'" access='does not have ([a-z]+\.[a-zA-Z.]+) (access|permission)'
  local service='([a-z]+\.googleapis\.com)'
  if [[ $text =~ $quota ]]; then
    local name=${BASH_REMATCH[2]}
    [[ $text =~ $limit ]] && where=" (limit ${BASH_REMATCH[1]}${BASH_REMATCH[4]:+ in ${BASH_REMATCH[4]}})"
    echo "your quota $name$where does not allow it: ask for more on the console's page IAM & Admin > Quotas, or try another --zone, or --spot (a quota of its own)"
  elif [[ $text =~ [Nn]o\ more\ capacity|ZONE_RESOURCE_POOL_EXHAUSTED|enough\ resources|[Ss]tockout ]]; then
    echo "the zone ${ZONE:-} has none left: try another --zone, or wait in line with --queued (TPUs)"
  elif [[ $text =~ SERVICE_DISABLED|has\ not\ been\ used\ in\ project && $text =~ $service ]]; then
    echo "the API is switched off: gcloud services enable ${BASH_REMATCH[1]}"
  elif [[ $text =~ $permission ]]; then
    echo "you lack the permission ${BASH_REMATCH[2]}: gcp/iam lists what is needed, and which command needs it"
  elif [[ $text =~ $access ]]; then
    echo "you lack the permission ${BASH_REMATCH[1]}: gcp/iam lists what is needed, and which command needs it"
  elif [[ $text =~ PERMISSION_DENIED|\(Forbidden\)|\ 403 ]]; then
    echo "you lack a permission: gcp/iam lists what is needed, and which command needs it"
  elif [[ $text =~ active\ account|[Rr]eauthentication|Unauthorized|invalid_grant ]]; then
    echo "nobody is logged in: gcloud auth login"
  elif [[ $text =~ ALREADY_EXISTS|already\ exists|AlreadyExists ]]; then
    echo "it exists already: watch it, resume it or delete it, or choose another run.name"
  elif [[ $text =~ kind\ \"JobSet\" ]]; then
    echo "the cluster does not know JobSets: install the JobSet controller (jobset.sigs.k8s.io/docs/installation)"
  elif [[ $text =~ NOT_FOUND|[Nn]ot\ find|matched\ no\ objects ]]; then
    echo "there is nothing of that name (yet): watch shows what exists"
  elif [[ $text =~ RESOURCE_EXHAUSTED ]]; then
    echo "a quota or the zone's stock is used up: try another --zone, --spot or --queued"
  else
    echo "it was refused"
  fi
}

# Exits unless the object carries this run's labels. Arguments: name, its label maxlm-run, its label maxlm-owner.
check_label() {
  if [[ $2 != "$NAME" || $3 != "$OWNER" ]]; then
    die "$1 was not made by this run: it is labelled maxlm-run=${2:-(none)} maxlm-owner=${3:-(none)}, and this is $NAME of $OWNER;" \
      "choose another run.name, or say --owner if it is yours."
  fi
}
