#!/bin/sh
set -e
cd /app
python3 counter.py &
sleep 1
kill -USR1 "$(cat counter.pid)"
sleep 0.5
kill -TERM "$(cat counter.pid)"
wait
