_jaxscale() {
  local verb="${words[2]}" word="${PREFIX}"
  if (( CURRENT == 2 )); then
    compadd -- ${=$(_jaxscale_verbs)}
    return
  fi
  case "$word" in
    --config.*=*) ;;
    --config.*)
      local names="$(_jaxscale_settings "$(_jaxscale_kind "$verb")")"
      compadd -Q -S '' -- ${(f)"$(_jaxscale_next "$word" ${=names})"}
      ;;
    --config=*) compset -P '*=' && _files -g '*.py(-.)' ;;
    --*=*) compset -P '*=' && _files ;;
    *)
      local -a found=(${=$(_jaxscale_behind "$verb")})
      [[ -n "$(_jaxscale_kind "$verb")" ]] && found+=(--config.)
      compadd -S '' -- ${(M)found:#*[=.]}
      compadd -- ${found:#*[=.]}
      ;;
  esac
}
[[ -n "${funcstack[1]}" && "${funcstack[1]}" == _jaxscale ]] && _jaxscale "$@" || compdef _jaxscale jaxscale
