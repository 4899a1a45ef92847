package settings

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// tierFlag is the value of --dax, --disk, --program, --redis or --s3. All append to one list, which
// keeps their order.
type tierFlag struct {
	kind string
	list *[]tierEntry
}

var _ pflag.Value = tierFlag{}

// String implements pflag.Value.
func (tierFlag) String() string { return "" }

// Type implements pflag.Value. It returns the help's name for the value. pflag counts bytes, so the
// name has no ellipsis character.
func (f tierFlag) Type() string { return strings.ReplaceAll(shortForms[f.kind], "…", "...") }

// Set implements pflag.Value. It never returns an error, because pflag would repeat the value,
// which may contain a secret.
func (f tierFlag) Set(v string) error {
	*f.list = append(*f.list, shortTier("--"+f.kind, f.kind, v))
	return nil
}

// shortForms has the short form of each kind of tier, in one word.
var shortForms = map[string]string{
	TierDAX:     "DEVICE[,DEVICE…][:SIZE][:KEY=VALUE…]",
	TierDisk:    "DIR[,DIR…]:CAPACITY[:KEY=VALUE…]",
	TierProgram: "COMMAND|unix:SOCKET",
	TierRedis:   "URL[?KEY=VALUE&…]",
	TierS3:      "URL[?KEY=VALUE&…]",
}

var shortExamples = map[string]string{
	TierDAX:     "/dev/dax0.0,/dev/dax1.0:100G:hotplug=true",
	TierDisk:    "/mnt/nvme0/kv,/mnt/nvme1/kv:200G:admit=learned",
	TierProgram: "unix:/run/my-tier.sock",
	TierRedis:   "redis://cache.internal:6379/0?ttl=24h&password_file=/run/secrets/redis",
	TierS3:      "s3://kv-cache/llama?endpoint=https://minio.internal:9000",
}

// addTierFlags defines a flag for each kind of tier.
func addTierFlags(fs *pflag.FlagSet) {
	list := new([]tierEntry)
	for _, kind := range tierKinds {
		fs.Var(tierFlag{kind, list}, kind,
			fmt.Sprintf("Adds a tier of kind %s below those before it, such as %s. May be repeated; takes the place of the list tiers of the file, whose keys it has.",
				kind, shortExamples[kind]))
	}
}

// flagTiers returns the tiers of the command line, in their order.
func flagTiers(fs *pflag.FlagSet) []tierEntry {
	for _, kind := range tierKinds {
		if f := fs.Lookup(kind); f != nil {
			return *f.Value.(tierFlag).list
		}
	}
	return nil
}

// TierEnv returns the environment variable that adds tiers of a kind.
func TierEnv(kind string) string { return EnvPrefix + strings.ToUpper(kind) }

// envTiers returns the tiers of the environment. Variables have no order, so it returns devices
// first, then disks, programs, Redis servers and buckets.
func envTiers(environ []string) (out []tierEntry) {
	for _, kind := range tierKinds {
		for _, e := range environ {
			if v, ok := strings.CutPrefix(e, TierEnv(kind)+"="); ok {
				words := strings.Fields(v)
				if kind == TierProgram { // a command has blanks
					words = slices.DeleteFunc(strings.Split(v, "\n"),
						func(line string) bool { return strings.TrimSpace(line) == "" })
				}
				for _, word := range words {
					out = append(out, shortTier(TierEnv(kind), kind, word))
				}
			}
		}
	}
	return out
}

// shortTier splits the short form of a tier into keys and values. It does not check them.
func shortTier(source, kind, v string) tierEntry {
	e := tierEntry{source: source, keys: [][2]string{{"kind", kind}}}
	add := func(key, value string) { e.keys = append(e.keys, [2]string{key, value}) }
	form := fmt.Sprintf("want %s, such as %s", shortForms[kind], shortExamples[kind])
	if slices.Contains(localKinds, kind) {
		parts := strings.Split(v, ":")
		rest := parts[1:]
		switch has := len(rest) > 0 && !strings.Contains(rest[0], "="); {
		case kind == TierDAX && parts[0] == "":
			e.err = fmt.Errorf("%q has no device: %s", v, form)
			return e
		case kind == TierDAX:
			add("devices", parts[0])
			if has {
				add("size", rest[0])
				rest = rest[1:]
			}
		case parts[0] == "" || !has:
			e.err = fmt.Errorf("%q has no capacity: %s", v, form)
			return e
		default:
			add("paths", parts[0])
			add("capacity", rest[0])
			rest = rest[1:]
		}
		for _, p := range rest {
			key, value, ok := strings.Cut(p, "=")
			if !ok {
				e.err = fmt.Errorf("%q: %q is not KEY=VALUE: %s", v, p, form)
			}
			add(key, value)
		}
		return e
	}
	if kind == TierProgram {
		e.keys = append(e.keys, shortProgram(v))
		return e
	}
	add("url", v)
	return e
}

// splitURL turns the query of a tier's URL into keys.
func splitURL(e *tierEntry) error {
	var out [][2]string
	for _, kv := range e.keys {
		base, query, _ := strings.Cut(kv[1], "?")
		if kv[0] != "url" || query == "" {
			out = append(out, kv)
			continue
		}
		out = append(out, [2]string{"url", base})
		// url.ParseQuery keeps no order, and its errors repeat the value, which may be a secret.
		for p := range strings.SplitSeq(query, "&") {
			key, value, ok := strings.Cut(p, "=")
			value, err := url.QueryUnescape(value)
			if !ok || err != nil {
				return errors.New("url: what follows the ? is not KEY=VALUE&…, with keys of the tier")
			}
			out = append(out, [2]string{key, value})
		}
	}
	e.keys = out
	return nil
}
