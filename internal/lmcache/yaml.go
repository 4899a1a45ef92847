package lmcache

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// sections lists the sections of Lookaside's settings in the order of the output. A section within
// a section comes right behind it.
var sections = []string{"arena", "arena.dax", "tiers", "lookup", "admin", "log"}

// yaml returns the settings as YAML with comments.
func (c *converter) yaml() string {
	var b strings.Builder
	from := "LMCache's configuration"
	if c.src.Name != "" && c.src.Name != "-" {
		from += " in " + c.src.Name
	}
	b.WriteString(comment("", "Settings of Lookaside, made of "+from+
		" by lookaside config from-lmcache. At the end are the keys without an equivalent.", ""))
	for _, section := range sections {
		if section == "tiers" {
			c.yamlTiers(&b)
			continue
		}
		c.yamlSection(&b, section)
	}
	m := map[string]any{}
	for _, s := range c.connector {
		m[s.key] = s.value
	}
	// its values are words, numbers and booleans
	j, _ := json.Marshal(transferConfig{"LookasideConnector", cmp.Or(c.role, "kv_both"), m})
	b.WriteString("\n# For vLLM, --kv-transfer-config:\n#   " + string(j) + "\n")
	if missing := (&Result{Keys: c.keys}).Missing(); len(missing) > 0 {
		b.WriteString("\n# Without an equivalent:\n")
		for i, k := range missing {
			b.WriteString("#   " + oneLine(k.Key+": "+k.Value) + "\n")
			if i == len(missing)-1 || why(missing[i+1]) != why(k) {
				b.WriteString(comment("", why(k), "    "))
			}
		}
	}
	return b.String()
}

// yamlSection writes the settings of a section, if there are any.
func (c *converter) yamlSection(b *strings.Builder, section string) {
	head, indent := "\n"+section+":\n", "  "
	if _, within, ok := strings.Cut(section, "."); ok {
		head, indent = "  "+within+":\n", "    "
	}
	for _, s := range c.settings {
		name, ok := strings.CutPrefix(s.key, section+".")
		if !ok || strings.Contains(name, ".") {
			continue
		}
		b.WriteString(head)
		head = ""
		s.key = name
		writeSetting(b, indent, s)
	}
}

// transferConfig is the value of vLLM's --kv-transfer-config.
type transferConfig struct {
	Connector string         `json:"kv_connector"`
	Role      string         `json:"kv_role"`
	Extra     map[string]any `json:"kv_connector_extra_config"`
}

// why returns a reason in the form of comments.
func why(k Key) string {
	if k.Outcome == Unknown {
		return "unknown: " + k.Why
	}
	return k.Why
}

func (c *converter) yamlTiers(b *strings.Builder) {
	if len(c.tiers) == 0 {
		return
	}
	b.WriteString("\ntiers:\n")
	for _, t := range c.tiers {
		for _, n := range t.notes {
			b.WriteString(comment("  ", sentence(n), ""))
		}
		fmt.Fprintf(b, "  - kind: %s # %s\n", t.kind, oneLine(t.from))
		for _, s := range t.settings {
			writeSetting(b, "    ", s)
		}
	}
}

func writeSetting(b *strings.Builder, indent string, s setting) {
	if s.note != "" {
		b.WriteString(comment(indent, sentence(s.note), ""))
	}
	after := ""
	if s.from != "" {
		after = " # " + oneLine(s.from)
	}
	switch v := s.value.(type) {
	case []string:
		var parts []string
		for _, e := range v {
			parts = append(parts, scalar(e))
		}
		fmt.Fprintf(b, "%s%s: [%s]%s\n", indent, s.key, strings.Join(parts, ", "), after)
	case []device:
		if len(v) == 0 {
			fmt.Fprintf(b, "%s%s: []%s\n", indent, s.key, after)
			return
		}
		fmt.Fprintf(b, "%s%s:%s\n", indent, s.key, after)
		for _, d := range v {
			fmt.Fprintf(b, "%s  - path: %s\n", indent, scalar(d.Path))
			if d.Size != "" {
				fmt.Fprintf(b, "%s    size: %s\n", indent, scalar(d.Size))
			}
		}
	case string:
		fmt.Fprintf(b, "%s%s: %s%s\n", indent, s.key, scalar(v), after)
	default:
		fmt.Fprintf(b, "%s%s: %v%s\n", indent, s.key, v, after)
	}
}

// plain matches words that need no quotes in any version of YAML.
var plain = regexp.MustCompile(
	`^[A-Za-z/][A-Za-z0-9_./@+-]*(:[A-Za-z0-9_./@+-]+)*$|^[0-9]+(\.[0-9]+)?(K|M|G|T|ms|s|m|h)$`)

var reserved = []string{"true", "false", "yes", "no", "on", "off", "null", "y", "n"}

// scalar returns a word in the form that YAML reads as that word.
func scalar(v string) string {
	if plain.MatchString(v) && !slices.Contains(reserved, strings.ToLower(v)) {
		return v
	}
	j, _ := json.Marshal(v) // a string can always be marshalled
	var b strings.Builder
	for _, r := range string(j) {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, "\\U%08x", r)
		}
	}
	return b.String()
}

// oneLine returns text that does not end a comment and that YAML allows in one.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
}

// comment returns text as lines of a comment; hang is the start of each line.
func comment(indent, text, hang string) string {
	const width = 130
	var b strings.Builder
	start := indent + "#" + hang
	line := start
	for word := range strings.FieldsSeq(oneLine(text)) {
		if line != start && len(line)+1+len(word) > width {
			b.WriteString(line + "\n")
			line = start
		}
		line += " " + word
	}
	b.WriteString(line + "\n")
	return b.String()
}

// sentence returns a note as a sentence.
func sentence(text string) string {
	r, n := utf8.DecodeRuneInString(text)
	return string(unicode.ToUpper(r)) + text[n:] + "."
}
