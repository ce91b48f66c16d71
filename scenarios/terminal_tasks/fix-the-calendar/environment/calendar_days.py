"""Days of months and years."""

DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap(year: int) -> bool:
    return year % 4 == 0


def days_in_month(year: int, month: int) -> int:
    """Days of a month; January is 1. Raises `ValueError` for a month that does not exist."""
    return DAYS[month - 1] + (1 if month == 2 and is_leap(year) else 0)


def day_of_year(year: int, month: int, day: int) -> int:
    """Position of a date in its year; January 1 is 1. Raises `ValueError` for a date that does not exist."""
    return sum(days_in_month(year, each) for each in range(1, month)) + day
