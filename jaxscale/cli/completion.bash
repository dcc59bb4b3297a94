_jaxscale() {
  local line="${COMP_LINE:0:COMP_POINT}" verb="${COMP_WORDS[1]}" word kept breaks
  word="${line##*[[:space:]]}"
  breaks="${COMP_WORDBREAKS//[!=:]/}" # bash replaces only the part after the last of these characters
  kept=""
  [[ -n "$breaks" && "$word" == *["$breaks"]* ]] && kept="${word%"${word##*["$breaks"]}"}"
  local IFS=$' \t\n'
  if [[ $COMP_CWORD -le 1 ]]; then
    COMPREPLY=($(compgen -W "$(_jaxscale_verbs)" -- "$word"))
    return
  fi
  case "$word" in
    --config.*=*) COMPREPLY=() ;;
    --config.*) COMPREPLY=($(_jaxscale_next "$word" $(_jaxscale_settings "$(_jaxscale_kind "$verb")"))) ;;
    --config=*) COMPREPLY=($(_jaxscale_files "${word%%=*}=" "${word#*=}" '!*.py')) ;;
    --*=*) COMPREPLY=($(_jaxscale_files "${word%%=*}=" "${word#*=}" '')) ;;
    *)
      COMPREPLY=($(compgen -W "$(_jaxscale_behind "$verb")" -- "$word"))
      [[ -n "$(_jaxscale_kind "$verb")" && --config. == "$word"* ]] && COMPREPLY+=(--config.)
      ;;
  esac
  [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=./] ]] && compopt -o nospace 2>/dev/null
  COMPREPLY=("${COMPREPLY[@]#"$kept"}")
}
_jaxscale_files() { # PREFIX START FILTER: folders, and files that pass the filter
  compgen -P "$1" -S / -d -- "$2"
  compgen -P "$1" -X "$3" -f -- "$2" | while read -r file; do [[ -d "${file#"$1"}" ]] || echo "$file"; done
}
complete -F _jaxscale jaxscale
