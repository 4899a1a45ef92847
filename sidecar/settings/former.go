package settings

import (
	"fmt"
	"slices"
)

// A former is a name that a setting had, or the name of a setting that is gone.
type former struct {
	Setting // only its Key: the names in the environment and of the flag follow from it
	now     string
}

// renamed returns the former name of the setting now.
func renamed(key, now string) former { return former{Setting{Key: key}, now} }

// gone returns the name of a former setting whose value the program chooses now.
func gone(key string) former { return former{Setting: Setting{Key: key}} }

// formers lists the former names of all settings. A sidecar does not start with one of them: a
// setting without effect would be worse.
var formers = []former{
	renamed("arena.devices", "arena.dax.devices"),
	renamed("arena.offset", "arena.dax.offset"),
	renamed("arena.ranks", "arena.dax.ranks"),
	renamed("arena.rank", "arena.dax.rank"),
	renamed("arena.allow_files", "arena.dax.allow_files"),
	renamed("arena.hotplug", "arena.dax.hotplug"),
	renamed("arena.slab", "arena.dax.slab"),
	gone("arena.populate_threads"),
	gone("arena.low_water"),
	gone("arena.step"),
	gone("arena.grow_at"),
	gone("promotion.share"),
	gone("peers.hints_limit"),
	gone("peers.slots"),
	gone("events.hwm"),
	gone("events.interval"),
}

// A formerTierKey is a key that tiers of a kind had. The program chooses its value now.
type formerTierKey struct{ kind, key string }

var formerTierKeys = []formerTierKey{
	{TierRedis, "split"},
	{TierDAX, "restore_workers"},
	{TierDAX, "restore_max_regions"},
	{TierDAX, "store_workers"},
	{TierDAX, "lookup_workers"},
}

// formerError returns the error for a former name of a setting, as form writes names, and nil for
// any other name. what begins the error, and prefix every name.
func formerError(what, got, prefix string, form func(Setting) string) error {
	i := slices.IndexFunc(formers, func(f former) bool { return form(f.Setting) == got })
	if i < 0 {
		return nil
	}
	if formers[i].now == "" {
		return fmt.Errorf("%s: %w", what, goneError(prefix+got))
	}
	return fmt.Errorf("%s: %q is called %q now", what, prefix+got,
		prefix+form(Setting{Key: formers[i].now}))
}

func goneError(name string) error {
	return fmt.Errorf("%q is no setting any more: the program chooses it now; remove it", name)
}
