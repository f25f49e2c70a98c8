#compdef @stage@
# Completion for zsh: the program itself says what may follow.
local -a following
following=(${(f)"$($words[1] --complete "${(@)words[2,CURRENT-1]}" 2>/dev/null)"})
if (( $#following )); then
  following=(${${following//:/\\:}/$'\t'/:})
  _describe @stage@ following
else
  _files
fi
