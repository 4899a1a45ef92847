package settings

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"lookaside/tiers/tenant"
)

func TestTenants(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"tenants:\n  arena_shares: team-a=40%, b=0.25\n  default_share: 10%\n",
		"tenants:\n  arena_shares: [team-a=40%, 'b = 25 %']\n  default_share: 0.1\n",
	} {
		c, err := Parse("test", []byte(text), nil)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]float64{"team-a": 0.4, "b": 0.25}
		if s := &c.Tenants; !maps.Equal(s.Arena, want) || !maps.Equal(s.Tiers, want) ||
			s.DefaultShare != 0.1 || s.Max != 32 || !s.Divided() {
			t.Errorf("%q: %+v", text, s)
		}
	}
	d := Defaults()
	if d.Tenants.Divided() {
		t.Error("by default there are shares")
	}
}

func TestTenantsAreRefused(t *testing.T) {
	t.Parallel()
	var many []string
	for i := range tenant.MaxIDs {
		many = append(many, fmt.Sprintf("t%d=1%%", i))
	}
	for text, want := range map[string]string{
		"arena_shares: a=60%,b=50%":               "tenants.arena_shares: the shares add up to 110 %",
		"tier_shares: [a=100%, b=1%]":             "tenants.tier_shares: the shares add up to 101 %",
		"arena_shares: a":                         "tenants.arena_shares: \"a\" is not the share of a tenant",
		"arena_shares: a=0%":                      "tenant \"a\": \"0%\" is not a share",
		"arena_shares: a=x":                       "is not a share",
		"arena_shares: =4%":                       "is no name of a tenant",
		"arena_shares: a=1%,a=2%":                 "tenant \"a\" is there twice",
		"arena_shares: [a=1, {b: 2}]":             "is not a share of a tenant",
		"default_share: 101%":                     "tenants.default_share: \"101%\" is not a share",
		"max: 1000":                               "tenants.max",
		"tier_shares: " + strings.Join(many, ","): "tenants",
	} {
		_, err := Parse("test", []byte("tenants:\n  "+text+"\n"), nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
