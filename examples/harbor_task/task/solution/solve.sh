#!/bin/sh
awk '$4 == 500 {print $3}' /app/access.log | sort | uniq -c | sort -rn | awk 'NR == 1 {print $2}' >/app/worst.txt
