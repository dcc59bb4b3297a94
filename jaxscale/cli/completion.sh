_jaxscale_next() { # WORD NAME ...: names up to the next dot after WORD, without repeats
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
