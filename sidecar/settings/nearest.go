package settings

import (
	"fmt"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
)

// settingNames returns every setting's name as form writes it.
func settingNames(form func(Setting) string) []string {
	names := make([]string, 0, len(settings))
	for _, s := range settings {
		names = append(names, form(s))
	}
	return names
}

func (s Setting) key() string { return s.Key }

// unknown returns an error that begins with what and contains the name nearest to got.
func unknown(what, got, prefix string, names []string) error {
	return fmt.Errorf("%s; the nearest is %q", what, prefix+Nearest(got, names))
}

// Nearest returns the name that got was probably meant to be.
func Nearest(got string, names []string) string {
	best, distance := "", len(got)+64
	for _, name := range names {
		d := levenshtein.ComputeDistance(strings.ToLower(got), strings.ToLower(name))
		// The most common mistake is a name without its section.
		if rest := len(name) - len(got); rest > 0 && strings.ContainsAny(name[rest-1:rest], ".-") &&
			strings.EqualFold(name[rest:], got) {
			d = 1
		}
		if d < distance {
			best, distance = name, d
		}
	}
	return best
}

// nearestOf returns nil if v is one of choices, else an error with the nearest one.
func nearestOf(v string, choices []string) error {
	if slices.Contains(choices, v) {
		return nil
	}
	return unknown(fmt.Sprintf("%q is none of %s", v, strings.Join(choices, ", ")), v, "", choices)
}
