#!/bin/sh
if [ "$(cat /app/worst.txt)" = /pay ]; then
    echo 1 >/logs/verifier/reward.txt
else
    echo 0 >/logs/verifier/reward.txt
fi
