package remote

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// rotRedis changes a byte in every part of every chunk with a prefix.
func rotRedis(t testing.TB, clients ...*redis.Client) func(prefix string) {
	return func(prefix string) {
		t.Helper()
		for _, c := range clients {
			keys, err := c.Keys(t.Context(), prefix+"/*}-*/*").Result()
			if err != nil {
				t.Fatal(err)
			}
			for i, k := range keys {
				n, err := c.StrLen(t.Context(), k).Result()
				if err != nil {
					t.Fatal(err)
				}
				at := int64(i*977) % n
				b := []byte(c.GetRange(t.Context(), k, at, at).Val())
				if err := c.SetRange(t.Context(), k, at,
					string([]byte{b[0] ^ 0x10})).Err(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// stalled stops processes until they are to go on.
func stalled(servers ...*server) func() func() {
	return func() func() {
		for _, s := range servers {
			s.signal(syscall.SIGSTOP)
		}
		return func() {
			for _, s := range servers {
				s.signal(syscall.SIGCONT)
			}
		}
	}
}

func client(t testing.TB, s *server) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: s.addr, Password: password, DialTimeout: unhurried,
		ReadTimeout: unhurried, WriteTimeout: unhurried})
	t.Cleanup(func() { c.Close() })
	return c
}

func TestContractRedis(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	o := RedisOptions{DialTimeout: unhurried, Addrs: []string{s.addr},
		Password: Secret{File: passwordFile(t)}, SplitBytes: minSplit}
	tiertest.Run(t, factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, client(t, s)), stalled(s)))
}

func TestContractRedisTLS(t *testing.T) {
	t.Parallel()
	files := certificates(t)
	port := freePort(t)
	s := redisServerOn(t, port, "--port", "0", "--tls-port", fmt.Sprint(port), "--tls-ca-cert-file",
		files.CA, "--tls-cert-file", files.Cert, "--tls-key-file", files.Key)
	conf, err := files.config()
	if err != nil {
		t.Fatal(err)
	}
	c := redis.NewClient(&redis.Options{Addr: s.addr, Password: password, TLSConfig: conf,
		DialTimeout: unhurried, ReadTimeout: unhurried, WriteTimeout: unhurried})
	t.Cleanup(func() { c.Close() })
	o := RedisOptions{DialTimeout: unhurried, Addrs: []string{s.addr},
		Password: Secret{File: passwordFile(t)}, TLS: true, Files: files, TTL: time.Hour}
	f := factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, c), stalled(s))
	f.Brief = true
	tiertest.Run(t, f)
}

// redisCluster starts three masters that know each other.
func redisCluster(t *testing.T) (nodes []*server, o RedisOptions) {
	t.Helper()
	var addrs []string
	for range 3 {
		port := freePort(t)
		s := redisServerOn(t, port, "--port", fmt.Sprint(port), "--cluster-enabled", "yes",
			"--cluster-node-timeout", "60000", "--cluster-port", fmt.Sprint(freePort(t)))
		nodes, addrs = append(nodes, s), append(addrs, s.addr)
	}
	redisCLI(t, append(append([]string{"--cluster", "create"}, addrs...), "--cluster-replicas", "0",
		"--cluster-yes")...)
	for _, s := range nodes { // each finds out for itself, and refuses all keys until then
		c := client(t, s)
		for deadline := time.Now().Add(unhurried); ; time.Sleep(50 * time.Millisecond) {
			info, err := c.ClusterInfo(t.Context()).Result()
			if strings.Contains(info, "cluster_state:ok") {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal(info, err)
			}
		}
	}
	o = RedisOptions{DialTimeout: unhurried, Mode: RedisCluster, Addrs: addrs[:1],
		Password: Secret{File: passwordFile(t)}}
	awaitReady(t, openRedis(t, o))
	return nodes, o
}

func redisCLI(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("redis-cli", append([]string{"--no-auth-warning", "-a", password},
		args...)...).CombinedOutput(); err != nil {
		t.Fatalf("redis-cli %q: %v\n%s", args, err, out)
	}
}

func TestContractRedisCluster(t *testing.T) {
	t.Parallel()
	nodes, o := redisCluster(t)
	var clients []*redis.Client
	for _, s := range nodes {
		clients = append(clients, client(t, s))
	}
	tiertest.Run(t, factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, clients...), stalled(nodes...)))
	for i, c := range clients {
		if n := c.Info(t.Context(), "commandstats").Val(); !strings.Contains(n, "cmdstat_exec") {
			t.Errorf("node %d stored nothing", i)
		}
	}
}

// Slots move to another node while chunks are loaded and stored: nothing is lost.
func TestClusterMoves(t *testing.T) {
	t.Parallel()
	nodes, o := redisCluster(t)
	tier := openRedis(t, o)
	space := tiertest.NewSpace("moves", geometry)
	var all []tiers.Transfer
	for i := range byte(60) {
		all = append(all, chunkOf(space, i, 2, 3, 4))
	}
	mustStore(t, tier, all...)
	id := func(s *server) string {
		return client(t, s).Do(t.Context(), "cluster", "myid").Val().(string)
	}
	moved := make(chan struct{})
	go func() {
		defer close(moved)
		redisCLI(t, "--cluster", "reshard", nodes[0].addr, "--cluster-from", id(nodes[0]),
			"--cluster-to", id(nodes[1]), "--cluster-slots", "5461", "--cluster-yes")
	}()
	for again := true; again; {
		select {
		case <-moved:
			again = false
		default:
		}
		for i, tr := range all {
			if err := load(t.Context(), tier, tr); err != nil {
				t.Fatalf("chunk %d: %v", i, err)
			}
		}
		mustStore(t, tier, all[:10]...)
	}
	if keys := client(t, nodes[0]).DBSize(t.Context()).Val(); keys != 0 {
		t.Errorf("%d keys did not move", keys)
	}
}

// sentinel starts a sentinel that watches a master, and waits until it knows it and its replicas.
// One that does not answer for a minute is dead to it, unless fails says otherwise.
func sentinel(t *testing.T, master *server, replicas int) *server {
	t.Helper()
	host, port, _ := strings.Cut(master.addr, ":")
	own := freePort(t)
	file := filepath.Join(t.TempDir(), "sentinel.conf")
	conf := fmt.Sprintf("bind 127.0.0.1\nport %d\nsentinel monitor kv %s %s 1\nsentinel auth-pass kv \"%s\"\nsentinel down-after-milliseconds kv 60000\nsentinel failover-timeout kv 3000\nrequirepass watch\n",
		own, host, port, password)
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	s := launch(t, &server{path: "redis-server", args: []string{file, "--sentinel"},
		addr: fmt.Sprintf("127.0.0.1:%d", own)})
	c := sentinelClient(s)
	defer c.Close()
	// When it has stood still for 2 s, it does nothing for 30 s, as it does not trust its clock.
	if err := c.Process(t.Context(), redis.NewStatusCmd(t.Context(), "sentinel", "debug",
		"tilt-trigger", "600000")); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(unhurried); ; time.Sleep(50 * time.Millisecond) {
		if found, err := c.Replicas(t.Context(), "kv").Result(); err == nil &&
			len(found) == replicas && (replicas == 0 || found[0]["master-link-status"] == "ok") {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatal("the sentinel does not find the servers")
		}
	}
}

func sentinelClient(s *server) *redis.SentinelClient {
	return redis.NewSentinelClient(&redis.Options{Addr: s.addr, Password: "watch",
		DialTimeout: unhurried, ReadTimeout: unhurried, WriteTimeout: unhurried})
}

// fails says after how long without an answer a server is dead to a sentinel.
func fails(t *testing.T, s *server, after time.Duration) {
	t.Helper()
	c := sentinelClient(s)
	defer c.Close()
	if err := c.Set(t.Context(), "kv", "down-after-milliseconds",
		fmt.Sprint(after.Milliseconds())).Err(); err != nil {
		t.Fatal(err)
	}
}

func sentinelOptions(t *testing.T, s *server) RedisOptions {
	t.Setenv("REMOTE_TEST_SENTINEL", "watch")
	return RedisOptions{DialTimeout: unhurried, Mode: RedisSentinel, Addrs: []string{s.addr},
		Master: "kv", SentinelPassword: Secret{Env: "REMOTE_TEST_SENTINEL"},
		Password: Secret{File: passwordFile(t)}}
}

func TestContractRedisSentinel(t *testing.T) {
	master := redisServer(t)
	o := sentinelOptions(t, sentinel(t, master, 0))
	// The sentinel takes a stalled master for dead, and there is no other: stalling is left to
	// TestFailover.
	f := factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, client(t, master)), nil)
	f.Brief = true
	tiertest.Run(t, f)
}

// The master dies, and a replica takes its place: after failures all is as before.
func TestFailover(t *testing.T) {
	master := redisServer(t)
	host, port, _ := strings.Cut(master.addr, ":")
	redisServer(t, "--replicaof", host, port, "--repl-diskless-sync-delay", "0")
	watch := sentinel(t, master, 1)
	tier := openRedis(t, sentinelOptions(t, watch))
	tr := chunkOf(tiertest.NewSpace("failover", geometry), 1, 2, 3, 4)
	mustStore(t, tier, tr)
	if n := client(t, master).Wait(t.Context(), 1, unhurried).Val(); n != 1 {
		t.Fatal("the replica does not follow")
	}
	stop := stalled(master)()
	defer stop()
	fails(t, watch, 500*time.Millisecond)
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err := load(ctx, tier, tr)
		cancel()
		if err == nil {
			fails(t, watch, unhurried)
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the tier does not come back: %v", err)
		}
	}
	mustStore(t, tier, chunkOf(tiertest.NewSpace("failover", geometry), 2, 2, 3, 4))
}

// TestContractValkey runs where there is Valkey: Debian has it from version 13 on.
func TestContractValkey(t *testing.T) {
	t.Parallel()
	path, err := exec.LookPath("valkey-server")
	if err != nil {
		t.Skip("no valkey-server on PATH")
	}
	port := freePort(t)
	s := launch(t, &server{path: path, addr: fmt.Sprintf("127.0.0.1:%d", port),
		args: []string{"--bind", "127.0.0.1", "--port", fmt.Sprint(port), "--save", "", "--dir",
			t.TempDir(), "--requirepass", password}})
	o := RedisOptions{DialTimeout: unhurried, Addrs: []string{s.addr},
		Password: Secret{File: passwordFile(t)}}
	tiertest.Run(t, factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenRedis(o)
	}, rotRedis(t, client(t, s)), stalled(s)))
}
