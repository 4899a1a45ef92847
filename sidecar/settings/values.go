package settings

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"lookaside/internal/bytesize"
)

// choices returns the unit of a setting with the given values.
func choices(of []string) string {
	if len(of) == 1 {
		return of[0]
	}
	return strings.Join(of[:len(of)-1], ", ") + " or " + of[len(of)-1]
}

func parseSize(v string) (int64, error) {
	n, err := bytesize.Parse(v)
	if err == nil && n <= 0 {
		err = fmt.Errorf("%q is not above 0", v)
	}
	return n, err
}

func parseFraction(v string) (float64, error) {
	f, err := strconv.ParseFloat(v, 64)
	if err != nil || !(f > 0 && f <= 1) {
		return 0, fmt.Errorf("%q is not a fraction above 0 and at most 1", v)
	}
	return f, nil
}

func parseBool(v string) (bool, error) {
	b, err := strconv.ParseBool(v)
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", v)
	}
	return b, nil
}

func parseInt(v string, low, high int) (int, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < low || n > high {
		return 0, fmt.Errorf("%q is not a whole number from %d to %d", v, low, high)
	}
	return n, nil
}

func parseDuration(v string, low time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration such as 250ms, 30s or 5m", v)
	}
	if d < low {
		return 0, fmt.Errorf("%q is below %v", v, low)
	}
	return d, nil
}

// Each function below returns a setter, which parses a value into a field of C. C is a [Config] or
// a [TierConfig].

// text accepts any text.
func text[C any](field func(*C) *string) func(*C, string) error {
	return func(c *C, v string) error {
		*field(c) = v
		return nil
	}
}

// checked accepts a text if check returns nil.
func checked[C any](check func(string) error, field func(*C) *string) func(*C, string) error {
	return func(c *C, v string) error {
		*field(c) = v
		return check(v)
	}
}

// choice accepts one of a list of names. Its error contains the nearest one.
func choice[C any](of []string, field func(*C) *string) func(*C, string) error {
	return checked(func(v string) error { return nearestOf(v, of) }, field)
}

// oneOf accepts one of a few names. Its error lists them.
func oneOf[C any](field func(*C) *string, allowed ...string) func(*C, string) error {
	return checked(func(v string) error {
		if !slices.Contains(allowed, v) {
			return fmt.Errorf("%q is none of %v", v, allowed)
		}
		return nil
	}, field)
}

// parsed accepts what parse can parse.
func parsed[C, V any](parse func(string) (V, error), field func(*C) *V) func(*C, string) error {
	return func(c *C, v string) (err error) {
		*field(c), err = parse(v)
		return err
	}
}

// size accepts a number of bytes above 0.
func size[C any](field func(*C) *int64) func(*C, string) error { return parsed(parseSize, field) }

// sizeOrZero accepts a number of bytes.
func sizeOrZero[C any](field func(*C) *int64) func(*C, string) error {
	return parsed(bytesize.Parse, field)
}

// fraction accepts a number above 0 and at most 1.
func fraction[C any](field func(*C) *float64) func(*C, string) error {
	return parsed(parseFraction, field)
}

// boolean accepts true or false.
func boolean[C any](field func(*C) *bool) func(*C, string) error { return parsed(parseBool, field) }

// whole accepts a whole number from low to high.
func whole[C any](low, high int, field func(*C) *int) func(*C, string) error {
	return parsed(func(v string) (int, error) { return parseInt(v, low, high) }, field)
}

// duration accepts a duration of at least low.
func duration[C any](low time.Duration, field func(*C) *time.Duration) func(*C, string) error {
	return parsed(func(v string) (time.Duration, error) { return parseDuration(v, low) }, field)
}
