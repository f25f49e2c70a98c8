#!/bin/sh
# What help2man reads of a program, $PROGRAM: its --help, and its commands' options under a heading each.
if [ "$1" = --version ]; then
  exec "$PROGRAM" --version
fi
"$PROGRAM" --help
"$PROGRAM" --complete | cut -f 1 | grep -v '^-' | while read -r command; do
  echo "Options of $command:"
  "$PROGRAM" "$command" --help | sed '1,/^Options:/d'
done
