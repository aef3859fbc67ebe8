# Stands in for gcloud, kubectl, srun and others: records every word it is called with, and answers from a table. It is started hundreds of
# times: bash takes a fifth of Python's time to start.
#
# STAND_IN names a folder. `calls` grows by a record a call: its words, and the files among them that are sent to the cloud. `answers` is a
# table of rules, `match times code wait out err`; the first that fits answers (`match`: words that stand side by side in the call; `times`:
# how often, -1 for ever; `used` has a file for each time). Records end with \x1e, fields with \x1f.
# Buckets are folders under `buckets/`, so that `gcloud storage` works; any other command succeeds in silence, except that no machine exists.
name=${0##*/} call="${0##*/} $*" files='' record='' text='' number=0

for word; do
  record+=$'\x1f'$word
  case $word in
    --metadata-from-file=startup-script=* | --filename=*) # files with recorded contents
      word=${word#--metadata-from-file=startup-script=} # and not `$(<file)`, which loses the last newline
      IFS= read -r -d '' text <"${word#--filename=}"
      files+=$text
      ;;
  esac
done
printf '%s\x1f%s%s\x1e' "$files" "$name" "$record" >>"$STAND_IN/calls"

answer() { # code wait out err; with `wait`: stay so many seconds, and end with `code` when SIGTERM comes
  printf %s "$3"
  printf %s "$4" >&2
  [[ $2 != 0 ]] || exit "$1"
  trap "kill \$!; : >'$STAND_IN/terminated'; exit $1" TERM
  : >"$STAND_IN/waiting"
  /bin/sleep "$2" &
  wait "$!"
  exit 99
}

take() { # one of the times $2 of rule $1, which no other call has: a file is made by one call only
  local count
  [[ $2 != -1 ]] || return 0
  set -o noclobber
  for ((count = 1; count <= $2; count++)); do
    { : >"$STAND_IN/used/$1.$count"; } 2>/dev/null && { set +o noclobber; return 0; }
  done
  set +o noclobber
  return 1
}

if [[ -e $STAND_IN/answers ]]; then
  while IFS=$'\x1f' read -r -d $'\x1e' match times code wait out err; do
    if [[ $call == *"$match"* ]] && take "$number" "$times"; then answer "$code" "$wait" "$out" "$err"; fi
    ((++number))
  done <"$STAND_IN/answers"
fi

if [[ $1 == storage ]]; then
  verb='' paths=()
  for word in "${@:2}"; do
    case $word in
      --*) ;;
      gs://*) paths+=("$STAND_IN/buckets/${word#gs://}") ;;
      *) if [[ -z $verb ]]; then verb=$word; else paths+=("$word"); fi ;;
    esac
  done
  source=${paths[0]} target=${paths[-1]}
  if [[ ! -e $source && $source != - ]]; then
    printf 'ERROR: (gcloud.storage.%s) The following URLs matched no objects or files:\n%s\n' "$verb" "$source" >&2
    exit 1
  fi
  case $verb in
    cat) cat "$source" ;;
    cp)
      [[ $target != */* || -d ${target%/*} ]] || mkdir -p "${target%/*}"
      if [[ $source == - ]]; then cat >"$target"; else cat "$source" >"$target"; fi
      ;;
    rsync) mkdir -p "$target" && cp -r "$source/." "$target" ;;
  esac
  exit
fi

if [[ " $* " == *" describe "* || "$1 $2" == "get jobset" ]]; then
  printf 'ERROR: (%s) NOT_FOUND: Resource was not found.\n' "$name" >&2
  exit 1
fi
exit 0
