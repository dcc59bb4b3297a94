_jaxscale_next() { # WORD NAME ...: names up to the dot behind WORD, each once
  local word="$1" name rest last=""
  shift
  for name in "$@"; do
    [[ "$name" == "$word"* ]] || continue
    rest="${name#"$word"}"
    [[ "$rest" == *.* ]] && name="$word${rest%%.*}."
    [[ "$name" == "$last" ]] || echo "$name"
    last="$name"
  done
}
