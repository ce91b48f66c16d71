import unittest

from calendar_days import day_of_year, days_in_month


class CalendarTest(unittest.TestCase):
    def test_leap_years(self) -> None:
        self.assertEqual([days_in_month(year, 2) for year in (2023, 2024, 1900, 2000)], [28, 29, 28, 29])

    def test_day_of_year(self) -> None:
        self.assertEqual(day_of_year(2024, 12, 31), 366)

    def test_a_month_that_does_not_exist(self) -> None:
        with self.assertRaises(ValueError):
            days_in_month(2024, 0)
