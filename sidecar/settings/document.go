package settings

import (
	"fmt"
	"strings"
)

// Document returns docs/configuration.md.
func Document() string {
	var b strings.Builder
	b.WriteString(`# Settings of the sidecar

<!-- Generated from the tables in sidecar/settings by: go test ./sidecar/settings -run TestConfigurationDoc -update -->

` + "`lookaside serve`" + ` takes each setting from a YAML file (` + "`--config FILE` or `" + EnvConfigFile + "`" + `), from the environment and from flags; each of
these overrides the one before. An unknown name is an error that says which right one is nearest. In the YAML file the part
before the dot is a section:

` + "```yaml\narena:\n  limit: 16G\n  kind: hugetlb\nlog:\n  format: json\n```" + `

Sizes are bytes or have a suffix: ` + "`500M`, `500MiB`, `4G`" + ` (powers of 1024). Durations have a unit: ` + "`250ms`, `30s`, `5m`" + `.

` + firstSettings)
	section := ""
	for _, s := range settings {
		name, _, _ := strings.Cut(s.Key, ".")
		if name != section {
			if section == "arena" {
				tiersDoc(&b)
			}
			section = name
			fmt.Fprintf(&b, "## %s\n\n", section)
		}
		fmt.Fprintf(&b, "### %s\n\n%s\n\n- Value: %s\n- Default: %s\n- Environment: `%s`; flag: `--%s`\n\n", s.Key, s.Meaning, s.Unit, shownDefault(s.Default, s.derived), s.Env(), s.Flag())
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// firstSettings names the settings that everybody needs.
const firstSettings = `## The five that everybody needs

| setting | decides |
|---|---|
| [runtime.dir](#runtimedir) | where vLLM finds the sidecar: one directory for each rank |
| [arena.limit](#arenalimit) | how much memory the cache may take |
| [arena.kind](#arenakind) | what that memory is; the default takes huge pages where the host has some |
| [tiers](#tiers) | what lies below the memory: disks, DAX devices, Redis, S3 |
| [admin.listen](#adminlisten) | a fixed port for Prometheus; with [admin.token_file](#admintoken_file) where the host has other users |

The others have defaults that serve most hosts.

`

func shownDefault(def string, derived bool) string {
	switch {
	case def == "":
		return "unset"
	case derived && strings.Contains(def, " "):
		return def
	}
	return "`" + def + "`"
}

// tiersDoc writes the part of docs/configuration.md about tiers.
func tiersDoc(b *strings.Builder) {
	b.WriteString(`## tiers

The tiers below the arena, as a list, nearest first. A lookup walks them in this order; what it finds is brought into the arena. Without any,
the arena is all there is.

` + "```yaml" + `
tiers:
  - kind: dax
    devices: [{path: /dev/dax0.0, size: 100G}, /dev/dax1.0]
  - kind: disk
    paths: [/mnt/nvme0/kv, /mnt/nvme1/kv]
    capacity: 200G
    admit: learned
  - kind: redis
    url: rediss://lookaside@cache.internal:6379/0
    password_file: /run/secrets/redis
    ttl: 24h
  - kind: program
    command: python3 -m lookaside_mooncake --master 10.0.0.2:50051
  - kind: s3
    url: s3://kv-cache/llama
    endpoint: https://minio.internal:9000
` + "```" + `

On the command line and in the environment a tier is one word (a program's command is one line). Flags may be repeated, and are taken in their order whatever their kinds; a
variable may hold several words, and the tiers of ` + "`" + TierEnv(TierDAX) + "` come before those of `" + TierEnv(TierDisk) + "`, `" + TierEnv(TierProgram) + "`, `" + TierEnv(TierRedis) + "` and `" + TierEnv(TierS3) + "`" + `. If there is any such flag, the
tiers of the environment and of the file are not used; if there is any such variable, those of the file are not.

| kind | flag | variable | form | for example |
|---|---|---|---|---|
`)
	for _, kind := range tierKinds {
		form := strings.ReplaceAll(shortForms[kind], "|", "\\|")
		fmt.Fprintf(b, "| %s | `--%s` | `%s` | `%s` | `%s` |\n", kind, kind, TierEnv(kind), form,
			shortExamples[kind])
	}
	b.WriteString("\n")
	table := func(title string, list []TierSetting) {
		fmt.Fprintf(b, "### %s\n\n| key | value | default | meaning |\n|---|---|---|---|\n", title)
		for _, s := range list {
			key, def := "`"+s.Key+"`", shownDefault(s.Default, s.derived)
			if s.required {
				def = "(required)"
			}
			if title == allTiersTitle && len(s.Kinds) < len(tierKinds) {
				key += " (" + strings.Join(s.Kinds, ", ") + ")"
			}
			fmt.Fprintf(b, "| %s | %s | %s | %s |\n", key, s.Unit, def, s.Meaning)
		}
		b.WriteString("\n")
	}
	table(allTiersTitle, commonTierSettings)
	table("DAX", daxSettings)
	table("Disk", diskSettings)
	table("Programs", programSettings)
	table("Redis, Valkey", redisSettings)
	table("S3", s3Settings)
}

const allTiersTitle = "All tiers"
