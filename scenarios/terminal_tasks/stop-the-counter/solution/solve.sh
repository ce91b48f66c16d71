#!/bin/sh
set -e
cd /app
python3 counter.py &
until test -s counter.pid; do
    kill -0 $!
    sleep 0.1
done
until grep -Eqs '"count": ([3-9]|[1-9][0-9])' state.json; do
    kill -USR1 "$(cat counter.pid)"
    sleep 0.2
done
kill -TERM "$(cat counter.pid)"
wait
