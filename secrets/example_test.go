package secrets_test

import (
	"fmt"
	"os"
	"path/filepath"

	"example.com/kip/secrets"
)

func Example() {
	dir, err := os.MkdirTemp("", "secrets")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	harbor := filepath.Join(dir, "harbor")
	if err := os.Mkdir(harbor, 0o700); err != nil {
		panic(err)
	}
	config := `{"auths":{"harbor.example.com":{"auth":"dTpw"},"https://harbor.example.com/team":{"auth":"!"}}}`
	if err := os.WriteFile(filepath.Join(harbor, ".dockerconfigjson"), []byte(config), 0o600); err != nil {
		panic(err)
	}

	keyring, problems := secrets.Load(dir)
	for _, problem := range problems {
		fmt.Println(problem.Source, problem.Key, problem.Message)
	}
	for _, credential := range keyring.Lookup("harbor.example.com/team/kernel-py") {
		fmt.Println(credential.Name(), credential.Username, credential.Password)
	}
	// Output:
	// harbor https://harbor.example.com/team auth is not base64: entry dropped
	// harbor/harbor.example.com u [redacted]
}
